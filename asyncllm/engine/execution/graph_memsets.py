"""Kernels in place of a graph's memsets.

The library clears a counter before some of its large products. Captured in a graph that is a memset node, which costs
some 4 µs where a kernel costs 1, several times in each layer: 2 % of the steps in which a small model reads prompts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

_MEMSET = 2  # CU_GRAPH_NODE_TYPE_MEMSET
_THREADS = 128

_FILL = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry fill(.param .u64 target, .param .u32 value, .param .u32 words)
{
    .reg .pred %p<2>;
    .reg .b32 %r<7>;
    .reg .b64 %d<4>;
    ld.param.u64 %d1, [target];
    ld.param.u32 %r1, [value];
    ld.param.u32 %r2, [words];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.s32 %r6, %r3, %r4, %r5;
    setp.ge.u32 %p1, %r6, %r2;
    @%p1 bra done;
    cvta.to.global.u64 %d1, %d1;
    mul.wide.u32 %d2, %r6, 4;
    add.s64 %d3, %d1, %d2;
    st.global.u32 [%d3], %r1;
done:
    ret;
}
"""
"""Sets so many words of 32 bits."""

Call = Callable[..., None]
"""Calls a function of the driver by name, and raises where it fails."""


class _Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("target", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_size", ctypes.c_uint),
        ("width", ctypes.c_size_t),  # elements of a line
        ("height", ctypes.c_size_t),
    )

    @property
    def words(self) -> int | None:
        """Words of 32 bits that it sets; None where it is of another kind."""
        size = self.width * self.element_size
        alike = self.element_size == 4 or self.value in (0, 0xFFFFFFFF)
        whole = self.height == 1 and size % 4 == 0 and self.target % 4 == 0 and size < 1 << 32
        return size // 4 if alike and whole else None


class _Launch(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


def replace_memsets(call: Call, graph: ctypes.c_void_p) -> int:
    """In a captured graph that is not yet instantiated; returns how many. The current context is that of the graph."""
    replaced = 0
    for node in _list(call, "cuGraphGetNodes", graph):
        kind = ctypes.c_int()
        call("cuGraphNodeGetType", node, ctypes.byref(kind))
        if kind.value != _MEMSET:
            continue
        memset = _Memset()
        call("cuGraphMemsetNodeGetParams", node, ctypes.byref(memset))
        if memset.words is not None:
            _replace(call, graph, node, memset, memset.words)
            replaced += 1
    return replaced


def _replace(call: Call, graph: ctypes.c_void_p, node: ctypes.c_void_p, memset: _Memset, words: int) -> None:
    before = _list(call, "cuGraphNodeGetDependencies", node)
    after = _list(call, "cuGraphNodeGetDependentNodes", node)
    target, value, count = ctypes.c_uint64(memset.target), ctypes.c_uint32(memset.value), ctypes.c_uint32(words)
    arguments = (ctypes.c_void_p * 3)(*(ctypes.addressof(each) for each in (target, value, count)))
    launch = _Launch(
        function=_fill_function(call, _current_context(call)),
        grid=(-(-words // _THREADS), 1, 1),
        block=(_THREADS, 1, 1),
        arguments=ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p)),
    )
    new = ctypes.c_void_p()
    nodes = (ctypes.c_void_p * len(before))(*(each.value for each in before))
    number = ctypes.c_size_t(len(before))
    call("cuGraphAddKernelNode_v2", ctypes.byref(new), graph, nodes, number, ctypes.byref(launch))
    for each in after:
        sources, targets = (ctypes.c_void_p * 1)(new.value), (ctypes.c_void_p * 1)(each.value)
        call("cuGraphAddDependencies", graph, sources, targets, ctypes.c_size_t(1))
    call("cuGraphDestroyNode", node)


def _list(call: Call, name: str, owner: ctypes.c_void_p) -> list[ctypes.c_void_p]:
    """What a function of the driver lists: it is asked for the number first."""
    count = ctypes.c_size_t()
    call(name, owner, None, ctypes.byref(count))
    found = (ctypes.c_void_p * count.value)()
    if count.value:
        call(name, owner, found, ctypes.byref(count))
    return [ctypes.c_void_p(each) for each in found]


def _current_context(call: Call) -> int:
    context = ctypes.c_void_p()
    call("cuCtxGetCurrent", ctypes.byref(context))
    return context.value or 0


_functions: dict[int, int] = {}  # by context; never given back


def _fill_function(call: Call, context: int) -> int:
    if (known := _functions.get(context)) is not None:
        return known
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(_FILL))
    call("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(b"fill"))
    _functions[context] = address = function.value or 0
    return address
