"""asyncllm measured: beside other engines, by parts, and its own cost without a model. `python -m benchmarks.NAME`.

Beside other engines, on the workloads of `asyncllm.workloads`:

- `compare`    asyncllm and transformers (or vLLM) on one model; `report` draws its table and plot anew
- `gpu`        all workloads on one GPU with random weights, beside goals; `profile_report` writes PROFILE.md of it,
  and `gpu_plots` draws it

What the engine costs, without a model:

- `planning`   a step of the scheduler alone, beside as many increments of an attribute
- `engine_cost`   a token through the whole engine, beside an `asyncio.Queue`
- `lock_releases`   how often a step gives the interpreter lock up, by part
- `http_cost`  a streamed token of the HTTP server, beside a bare handler of the same server

What a host and its clients see:

- `host`       the rate beside a host that spins or sleeps, by isolation
- `serving`    chat streams over HTTP without a model, by isolation
- `http`       chat streams over HTTP from a real model, by kinds of server

Where time and memory go:

- `cpu_steps`, `products`   a CPU step by operators, and its matrix products alone, which bound it
- `startup`    until the first token on a GPU
- `limits`     long prompts, many requests, and memory that comes back
- `settings`   what single settings cost or gain on a GPU; `cache_precision` what 8-bit caches do to a model's choices
- `virtual`    the scheduler's plans in virtual time, for who has no GPU

Kernels and forms:

- `kernels`, `sampling`, `attention`   on a GPU, checked and timed beside what the hardware allows
- `tune`       writes the table of the fastest products that the engine ships
- `structured`   compile and mask times, and what grammars make possible

`child` is one engine of a comparison, in a process of its own, and `http_server` what `http` measures. `skeleton`
writes a model's folder without its weights.
"""
