"""For tests of asyncllm and of what is built on it.

- `shadow_engine`: `AsyncEngine(ShadowModel())`, a whole engine without a model.
- `shadow`: the device under it, which finds every fault of the plans that it is given.
- `simulation`: a scheduler and a shadow device driven by hand, every answer checked.
- `strategies`, `state_machine`: the same driven by hypothesis (the `testing` extra).
- `tiny_models`: models of some kilobytes, written as folders on disk.
- `byte_tokenizer`: a tokenizer for a model that has none, `ShadowModel` say.
"""
