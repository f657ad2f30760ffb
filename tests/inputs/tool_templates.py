# ruff: noqa: E501  a template breaks no line where it would mean something
"""Chat templates that write tools, calls and answers as those of known models do, cut down to that."""

from __future__ import annotations

QWEN = r"""
{%- if tools %}
{{- '<|im_start|>system\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- '# Tools\n\n<tools>' }}{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
{{- '\n</tools>\n\nreturn each call within <tool_call></tool_call>:\n<tool_call>\n{"name": <function-name>, "arguments": ' }}
{{- '<args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
  {%- elif message.role == 'assistant' %}
    {{- '<|im_start|>assistant\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
      {%- if call.function %}{%- set call = call.function %}{%- endif %}
      {{- '\n' if message.content or not loop.first else '' }}{{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
      {%- if call.arguments is string %}{{- call.arguments }}{%- else %}{{- call.arguments | tojson }}{%- endif %}
      {{- '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- elif message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
    {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

HERMES = r"""
{{- '<|im_start|>system\nYou are a function calling AI model. <tools>' }}
{%- for tool in tools or [] %}{{- ' ' + (tool | tojson) }}{%- endfor %}{{- ' </tools> Answer in <tool_call></tool_call>.<|im_end|>\n' }}
{%- for message in messages %}
  {%- if message.role == 'tool' %}
    {{- '<|im_start|>tool\n<tool_response>\n{"name": "' + message.name + '", "content": ' + (message.content | tojson) }}
    {{- '}\n</tool_response><|im_end|>\n' }}
  {%- elif message.tool_calls is defined %}
    {{- '<|im_start|>' + message.role }}
    {%- for call in message.tool_calls %}
      {{- '\n<tool_call>\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

LLAMA3 = r"""
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- if tools is not none %}{{- 'Environment: ipython\n' }}{%- endif %}{{- system + '<|eot_id|>' }}
{%- if tools is not none %}
  {%- set first = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
  {{- '<|start_header_id|>user<|end_header_id|>\n\nRespond in the format {"name": function name, "parameters": ' }}
  {{- 'dictionary of argument name and its value}.\n\n' }}
  {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\n\n' }}{%- endfor %}{{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
  {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
  {%- elif 'tool_calls' in message %}
    {%- if not message.tool_calls | length == 1 %}{{- raise_exception('This model only supports single tool-calls!') }}{%- endif %}
    {%- set call = message.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' }}
    {{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
  {%- else %}
    {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
    {%- if message.content is mapping %}{{- message.content | tojson }}{%- else %}{{- message.content }}{%- endif %}
    {{- '<|eot_id|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}
"""

MISTRAL = r"""
{{- bos_token }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
  {%- if message.role == 'user' %}
    {%- if tools is not none and message == users[-1] %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
    {{- '[INST] ' + message.content + '[/INST]' }}
  {%- elif message.tool_calls is defined and message.tool_calls is not none %}
    {{- '[TOOL_CALLS] [' }}
    {%- for call in message.tool_calls %}
      {%- set out = call.function | tojson %}{{- out[:-1] }}
      {%- if not call.id is defined or call.id | length != 9 %}{{- raise_exception('Tool call IDs must have length 9!') }}{%- endif %}
      {{- ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- else %}{{- ']' + eos_token }}{%- endif %}
    {%- endfor %}
  {%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}
  {%- elif message.role == 'tool_results' or message.role == 'tool' %}
    {%- if message.content is defined and message.content.content is defined %}{%- set content = message.content.content %}
    {%- else %}{%- set content = message.content %}{%- endif %}
    {{- '[TOOL_RESULTS] {"content": ' + content | string }}
    {%- if not message.tool_call_id is defined or message.tool_call_id | length != 9 %}
      {{- raise_exception('Tool call IDs must have length 9!') }}
    {%- endif %}
    {{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
  {%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}{%- endif %}
{%- endfor %}
"""

DEEPSEEK = r"""
{{- bos_token }}
{%- for message in messages %}
  {%- if message['role'] == 'user' %}{{- '<｜User｜>' + message['content'] }}{%- endif %}
  {%- if message['role'] == 'assistant' and 'tool_calls' in message %}
    {%- for tool in message['tool_calls'] %}
      {%- if loop.first %}{{- '<｜Assistant｜>' + message['content'] + '<｜tool▁calls▁begin｜>' }}{%- else %}{{- '\n' }}{%- endif %}
      {{- '<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\n' + '```json' + '\n' }}
      {{- tool['function']['arguments'] + '\n' + '```' + '<｜tool▁call▁end｜>' }}
    {%- endfor %}
    {{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
  {%- elif message['role'] == 'assistant' %}{{- '<｜Assistant｜>' + message['content'] + '<｜end▁of▁sentence｜>' }}{%- endif %}
  {%- if message['role'] == 'tool' %}{{- '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\n' }}{%- endif %}
"""

# Writes the arguments as they are, without a filter.
RAW = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments }}){% endfor %}{% endfor %}"
