"""Kernels for the processor, in C++: compiled where they run, by `build`.

`source/` has the kernels; each module here has what calls one kind of them, and its plain-torch reference.
"""
