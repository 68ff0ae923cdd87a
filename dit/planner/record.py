"""Record what the real training step allocates and computes, on the meta device.

:class:`Recorder` sees every operation below autograd and every storage that comes and goes. It knows nothing of this
project's step; ``dit.planner.tracing`` drives it.
"""

import functools
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from dit.planner.trace import CATEGORIES, COLUMNS, PHASES, Events, Op, Recording

Internal = Callable[[object, tuple, dict, list[Tensor]], list[int]]
"""(operation, args, kwargs, outputs) -> bytes of the temporaries a kernel takes inside itself and gives back."""

_CATEGORY = {name: index for index, name in enumerate(CATEGORIES)}
_PHASE = {name: index for index, name in enumerate(PHASES)}
_OF_PHASE = {"build": "other", "data": "batch", "encode": "vae"}  # what else is allocated is temporary until it stays
_GATHERS = {"aten.embedding", "aten.index", "aten.gather"}  # read as much as they write, not the whole table


class Recorder(TorchDispatchMode):
    """Events and operations of everything that runs inside the mode. Make one per run.

    ``internal`` adds the temporaries of kernels; ``replaced`` gives, by operation, a stand-in for kernels that refuse
    meta; one that returns NotImplemented leaves the call alone. Operations are recorded while ``records_ops`` is set.
    """

    def __init__(self, internal: Internal, replaced: dict[object, Callable]):
        super().__init__()
        self._internal, self._replaced = internal, replaced
        self._rows: list[tuple[int, int, int, int, int]] = []  # tensor, signed bytes, phase, step, micro-step
        self._spans: list[tuple[int, int, int, int]] = []  # phase, first event, first after it, step
        self._categories: list[int] = []
        self._modules: list[int] = []
        self._alive: dict[int, tuple[int, weakref.ref]] = {}  # storage address -> tensor number, reference
        self._undecided: set[int] = set()  # temporary now, an activation if it outlives its scope
        self._module_names: dict[str, int] = {"": 0}
        self._module_of_node: dict[int, int] = {}  # autograd sequence number -> module
        self._stack: list[int] = []
        self._paths: dict[int, int] = {}
        self._op_index: dict[Op, int] = {}
        self._op_sequence: list[int] = []
        self._facts: dict[object, tuple] = {}
        self._templates: dict[tuple, object] = {}
        self._stars: dict[int, str] = {}
        self.records_ops = False
        self.phase, self.step, self.micro_step = "build", 0, 0

    # ---- where we are ----

    def name_modules(self, root: nn.Module, prefix: str = "") -> None:
        """Give the modules under ``root`` their paths."""
        for path, module in root.named_modules(prefix=prefix):
            self._paths[id(module)] = self._module_names.setdefault(path, len(self._module_names))

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Follow modules as they are called, also where checkpointing leaves them by an exception."""
        def enter(module: nn.Module, args: object) -> None:
            self._stack.append(self._paths.get(id(module), self._stack[-1] if self._stack else 0))

        def leave(module: nn.Module, args: object, output: object) -> None:
            self._stack.pop()
            if not self._stack and self.phase == "backward":
                self._decide()  # what a recomputed block has left are activations again

        handles = [nn.modules.module.register_module_forward_pre_hook(enter),
                   nn.modules.module.register_module_forward_hook(leave, always_call=True)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def begin_step(self, step: int) -> None:
        self.step, self.micro_step, self.phase = step, -1, "data"

    @contextmanager
    def in_phase(self, name: str) -> Iterator[None]:
        """Label what happens inside, and after it until the next one, as phase ``name``. Every "data" begins a
        micro-step."""
        self.phase = name
        self.micro_step += name == "data"
        start = len(self._rows)
        yield
        if name == "forward":
            self._decide()
        self._spans.append((_PHASE[name], start, len(self._rows), self.step))

    def _decide(self) -> None:
        alive = {number for number, _ in self._alive.values()}
        for number in self._undecided & alive:  # None is what a sum has taken over
            self._categories[number] = _CATEGORY["activations"]
        self._undecided.clear()

    def end_step(self) -> None:
        """What a step leaves behind is no activation of it, but a table made at first use, or its result."""
        passing = (_CATEGORY["activations"], _CATEGORY["temporaries"])
        for number, _ in self._alive.values():
            if number is not None and self._categories[number] in passing:
                self._categories[number] = _CATEGORY["other"]

    # ---- memory ----

    def label(self, tensors: Iterator[Tensor], category: str) -> None:
        """Put the memory of ``tensors`` into a category, from its allocation on."""
        for tensor in tensors:
            entry = self._alive.get(tensor.untyped_storage()._cdata)
            if entry is not None:
                self._categories[entry[0]] = _CATEGORY[category]
                self._undecided.discard(entry[0])

    def _watch(self, tensor: Tensor, module: int) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._alive or tensor.device.type != "meta":
            return
        num_bytes = storage.nbytes()
        if not num_bytes:
            return
        self._follow(storage, address, self._allocate(num_bytes, module))

    def _follow(self, storage: torch.UntypedStorage, address: int, number: int) -> None:
        """Note when a storage dies, unless another one has taken its place by then (:meth:`_sum_in_place`)."""
        num_bytes = storage.nbytes()

        def freed(_: object) -> None:
            number, _ = self._alive.pop(address)
            if number is not None:
                self._free(number, num_bytes)

        self._alive[address] = (number, weakref.ref(storage, freed))

    def _sum_in_place(self, first: Tensor, result: Tensor) -> None:
        """Count a sum as written into its first operand.

        So the autograd engine adds up gradients on a device; meta tensors it takes for subclasses, and makes a new one
        (torch/csrc/autograd/input_buffer.cpp, can_accumulate_inplace).
        """
        old, new = first.untyped_storage(), result.untyped_storage()
        number, reference = self._alive[old._cdata]
        self._alive[old._cdata] = (None, reference)
        self._follow(new, new._cdata, number)

    def _allocate(self, num_bytes: int, module: int) -> int:
        number = len(self._categories)
        category = _OF_PHASE.get(self.phase, "temporaries")
        self._categories.append(_CATEGORY[category])
        self._modules.append(module)
        if self.phase == "forward" or (self.phase == "backward" and self._stack):
            self._undecided.add(number)
        self._rows.append((number, num_bytes, _PHASE[self.phase], self.step, max(self.micro_step, 0)))
        return number

    def _free(self, number: int, num_bytes: int) -> None:
        self._undecided.discard(number)
        self._rows.append((number, -num_bytes, _PHASE[self.phase], self.step, max(self.micro_step, 0)))

    # ---- operations ----

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if types and not all(kind in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # what a tensor of several others is made of comes here by itself
        kwargs = kwargs or {}
        result = self._run(func, args, kwargs)
        module = self._current_module()
        if func is torch.ops.aten.add.Tensor and self._is_engine_sum(args):
            self._sum_in_place(args[0], result)
            func = torch.ops.aten.add_.Tensor
        outputs = _tensors(result)
        for output in outputs:
            self._watch(output, module)
        taken = self._internal(func, args, kwargs, outputs)
        if taken:
            numbers = [self._allocate(num_bytes, module) for num_bytes in taken]
            for number, num_bytes in zip(numbers, taken, strict=True):
                self._free(number, num_bytes)
        if self.records_ops:
            self._record(func, args, kwargs, result, outputs, module)
        return result

    def _is_engine_sum(self, args: tuple) -> bool:
        """Whether two gradients of the same tensor are added up: nothing else adds in the backward outside of
        modules."""
        return (self.phase == "backward" and not self._stack and isinstance(args[1], Tensor)
                and args[0].shape == args[1].shape and args[0].dtype == args[1].dtype)

    def _run(self, func, args: tuple, kwargs: dict) -> object:
        """The operation's result. What it looks like is computed once per operation and arguments: blocks and steps
        repeat."""
        if func in self._replaced:
            result = self._replaced[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        if not _is_pure(func):
            return func(*args, **kwargs)
        try:
            key = (func, _form(args), _form(tuple(kwargs.items())))
            template = self._templates.get(key)
        except TypeError:  # an argument that cannot be a key
            return func(*args, **kwargs)
        if template is not None:
            return _from_template(template)
        result = func(*args, **kwargs)
        template = _template(result)
        if template is not None and not self._aliases(result):
            self._templates[key] = template
        return result

    def _aliases(self, result: object) -> bool:
        """Whether a result lies in memory that was there before, whatever the operation's schema says
        (_unsafe_view)."""
        return any(tensor.untyped_storage()._cdata in self._alive for tensor in _tensors(result))

    def _current_module(self) -> int:
        if self._stack:
            self._module_of_node[torch._C._autograd._get_sequence_nr() - 1] = self._stack[-1]
            return self._stack[-1]
        if self.phase == "backward":
            node = torch._C._current_autograd_node()
            return self._module_of_node.get(node._sequence_nr(), 0) if node is not None else 0
        return 0

    def _record(self, func, args, kwargs, result, outputs: list[Tensor], module: int) -> None:
        name, is_view, flops_of = self._facts_of(func)
        inputs = [tensor for tensor in _tensors(*args, *kwargs.values()) if tensor.is_meta]
        outputs = [tensor for tensor in outputs if tensor.is_meta]
        if not inputs and not outputs:
            return
        is_multi = "_foreach_" in name or "_fused_" in name
        lists = [len(arg) for arg in args if is_multi and isinstance(arg, list) and arg and isinstance(arg[0], Tensor)]
        written = outputs or inputs[:max(lists, default=1)]  # _fused_adamw_ and the like return nothing
        is_view = is_view or (name == "aten.empty" or name == "aten.empty_like" or name == "aten.empty_strided")
        op = Op(name=name, phase=self.phase, module=self._starred(module), dtype=str((outputs or inputs)[0].dtype)[6:],
                inputs=tuple(tuple(tensor.shape) for tensor in inputs) if not lists else (),
                outputs=tuple(tuple(tensor.shape) for tensor in outputs) if not lists else (),
                flops=int(flops_of(*args, **kwargs, out_val=result)) if flops_of is not None else 0,
                bytes_read=0 if is_view else _bytes(outputs if name in _GATHERS else inputs),
                bytes_written=0 if is_view else _bytes(written), kind="view" if is_view else "kernel",
                step=self.step, micro_step=max(self.micro_step, 0), num_tensors=max(lists, default=1),
                recomputed=self.phase == "backward" and bool(self._stack))
        self._op_sequence.append(self._op_index.setdefault(op, len(self._op_index)))

    def _facts_of(self, func) -> tuple:
        facts = self._facts.get(func)
        if facts is None:
            packet = func._overloadpacket
            returns = func._schema.returns
            is_view = packet is torch.ops.aten._unsafe_view or any(
                value.alias_info is not None and not value.alias_info.is_write for value in returns)
            facts = self._facts[func] = (f"{func.namespace}.{packet.__name__}", is_view, flop_registry.get(packet))
        return facts

    def _starred(self, module: int) -> str:
        if module not in self._stars:
            path = next(path for path, number in self._module_names.items() if number == module)
            self._stars[module] = re.sub(r"\.\d+(?=\.|$)", ".*", path) if path.startswith("blocks.") else path
        return self._stars[module]

    def finish(self, micro_batch: int) -> Recording:
        """What was recorded, as columns."""
        rows = np.array(self._rows, dtype=np.int64).reshape(-1, 5)
        number = rows[:, 0]
        values = {"tensor": number, "bytes": rows[:, 1], "phase": rows[:, 2], "step": rows[:, 3],
                  "micro_step": rows[:, 4],
                  "category": np.array(self._categories)[number], "module": np.array(self._modules)[number]}
        columns = {name: values[name].astype(dtype) for name, dtype in COLUMNS.items()}
        events = Events(columns, tuple(self._module_names), tuple(self._spans))
        return Recording(micro_batch, events, tuple(self._op_index), np.array(self._op_sequence, dtype=np.int32))


def _tensors(*values: object) -> list[Tensor]:
    """The tensors among ``values`` and in their lists: what torch.utils._pytree does, many times faster."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += _tensors(*value)
    return found


def _bytes(tensors: list[Tensor]) -> int:
    """Bytes behind ``tensors``; an expanded tensor counts what it holds, not what it shows."""
    return sum(min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()) for tensor in tensors)


# ---- results without computing them ----

@functools.cache
def _is_pure(func) -> bool:
    """Whether the operation writes nothing and returns new memory only."""
    return not func._schema.is_mutable and all(value.alias_info is None for value in func._schema.returns)


def _form(value: object) -> object:
    """What determines the form of a result: tensors by their layout, everything else by its value."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, tuple | list):
        return tuple(map(_form, value))
    if isinstance(value, float | int):
        return type(value), value
    return value


def _template(result: object) -> object:
    """A description from which :func:`_from_template` makes a result of the same form, or None if it is not all
    meta."""
    if isinstance(result, Tensor):
        return (tuple(result.shape), result.stride(), result.dtype) if result.is_meta else None
    if isinstance(result, tuple | list):
        parts = [part if part is None or isinstance(part, int) else _template(part) for part in result]
        return None if any(a is None and b is not None for a, b in zip(parts, result, strict=True)) else parts
    return None


def _from_template(template: object) -> object:
    if isinstance(template, tuple):
        return torch.empty_strided(template[0], template[1], dtype=template[2], device="meta")
    if isinstance(template, list):
        return tuple(map(_from_template, template))
    return template
