"""Tool calls in a model's text, found while the text comes: one file a format, and what they share."""

from asyncllm.outputs.tool_calls.choice_grammar import tool_choice_grammar
from asyncllm.outputs.tool_calls.definitions import ToolDefinition, read_tools
from asyncllm.outputs.tool_calls.deltas import (
    ArgumentsDelta,
    ContentDelta,
    ToolCall,
    ToolCallStart,
    ToolDelta,
    ToolMessage,
    join_deltas,
)
from asyncllm.outputs.tool_calls.tool_parser import TOOL_FORMATS, ToolParser, guess_tool_format, make_tool_parser

__all__ = [
    "TOOL_FORMATS",
    "ArgumentsDelta",
    "ContentDelta",
    "ToolCall",
    "ToolCallStart",
    "ToolDefinition",
    "ToolDelta",
    "ToolMessage",
    "ToolParser",
    "guess_tool_format",
    "join_deltas",
    "make_tool_parser",
    "read_tools",
    "tool_choice_grammar",
]
