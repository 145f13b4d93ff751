"""Extends Triton's interpreter, which runs kernels on CPU tensors: emulates inline PTX, refuses addresses outside of a
launch's tensors, accepts scalar conditions as masks, and keeps what it would compute again for each value and call."""

import ctypes
import functools
import itertools
import re
import sys
import threading
from types import SimpleNamespace

import numpy as np

LANE = 16
shared = np.zeros(99 * 1024, np.uint8)
pending_copies: list[tuple[int, bytes]] = []
pending_groups: list[list[tuple[int, bytes]]] = []  # copies of one commit group are waited for together
prefetched: list[tuple[int, int]] = []  # (start, end) addresses


class Memory:
    """The storages of a launch's tensors. Without the check, an access beside them would read or change whatever the
    process keeps there."""

    spans: list[tuple[int, int]] = []
    lanes: list[tuple[int, int]] = []  # of reads: lanes are read whole, and memory is allocated in whole lanes

    def hold(self, tensors):
        storages = (t.untyped_storage() for t in tensors)
        self.hold_spans((s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages)

    def hold_spans(self, spans):
        self.spans = sorted({(start, end) for start, end in spans if end > start})
        self.lanes = [(start // LANE * LANE, -(-end // LANE) * LANE) for start, end in self.spans]

    def check(self, addresses, mask, size, reads):
        mask = np.asarray(mask, bool)
        first = addresses if mask.all() else addresses[mask]
        if not first.size:
            return
        spans = self.lanes if reads else self.spans
        low, high = int(first.min()), int(first.max())
        if any(start <= low and high + size <= end for start, end in spans):
            return
        for address in map(int, first.flat):  # they are of several tensors
            if not any(start <= address and address + size <= end for start, end in spans):
                start, end = min(self.spans, key=lambda span: abs(span[0] - address), default=(0, 0))
                place = f"{address - start} bytes from the start of {end - start}"
                raise IndexError(
                    f"{'read' if reads else 'write'} of {size} bytes outside of the launch's tensors: {place}"
                )


memory = Memory()


class Results(list):
    def get_result(self, i):
        return self[i]


def reserve(asm, _):
    (size,) = re.findall(r"\.shared .*\[(\d+)\]", asm)
    # NaN, so that reading memory before a copy fills it fails the test.
    shared[: int(size)] = 0xFF
    pending_copies.clear()
    return [np.zeros(1, np.int32)]


def reserve_ring(asm, _):
    (size,) = re.findall(r"ring (\d+)", asm)
    shared[: int(size)] = 0xFF
    pending_groups.clear()
    return [np.zeros(1, np.int32)]


def lanes_at(addresses, wanted):
    """The bytes at each address that is wanted, else None."""
    memory.check(addresses, wanted, LANE, reads=True)
    return [ctypes.string_at(at, LANE) if goes else None for at, goes in zip(addresses.tolist(), wanted.tolist())]


def copy(_, values):
    to, source, wanted = (v.ravel() for v in values)
    lanes = zip(to.tolist(), lanes_at(source, wanted != 0))
    pending_copies.extend((slot, lane) for slot, lane in lanes if lane is not None)
    return [np.zeros(values[0].shape, np.int32)]


@functools.cache
def limit(asm):
    """The constant that the number of remaining columns is compared with."""
    return int(re.findall(r"setp\.gt\.s32 there, \$\d, (\d+);", asm)[0])


@functools.cache
def offset(asm, operand):
    return int(re.findall(rf"\[\${operand}\+(\d+)\]", asm)[0])


def copy_group(asm, values):
    slot, *rows, left = values
    copies = re.findall(r"\[\$1\+(\d+)\], \[\$(\d)\+(\d+)\], 16, size", asm)
    group, inside = [], left > limit(asm)
    for (at, _, row), source in zip(copies, rows):
        lanes = lanes_at(source + int(row), inside)
        group += [(to + int(at), lane or bytes(LANE)) for to, lane in zip(slot.tolist(), lanes)]
    pending_groups.append(group)
    return [np.zeros(slot.shape, np.int32)]


def complete(copies):
    for slot, lane in copies:
        shared[slot : slot + LANE] = np.frombuffer(lane, np.uint8)
    copies.clear()


def wait(_, values):
    complete(pending_copies)
    return [values[0]]


def wait_group(asm, values):
    (pending,) = re.findall(r"wait_group (\d+)", asm)
    while len(pending_groups) > int(pending):
        complete(pending_groups.pop(0))
    return [values[0]]


def read(asm, values):
    (slots,) = values
    at = offset(asm, 4) if "+" in asm else 0
    lanes = shared[(slots + at)[:, None] + np.arange(LANE)].view(np.int32)
    return [np.ascontiguousarray(lanes[:, i]) for i in range(4)]


def load(asm, values):
    at, left = values
    absent = re.findall(r"mov\.b32 \$0, (\d+);", asm)[0]
    missing = np.full(4, int(absent), np.int32).tobytes()
    found = b"".join(lane or missing for lane in lanes_at(at + offset(asm, 4), left > limit(asm)))
    lanes = np.frombuffer(found, np.int32).reshape(-1, 4)
    return [np.ascontiguousarray(lanes[:, i]) for i in range(4)]


def store(asm, values):
    at, *words, left = values
    return write(asm, [at + offset(asm, 1), *words, left > limit(asm)])


def write(_, values):
    to, *words = values[:5]
    wanted = values[5] != 0 if len(values) > 5 else np.ones(to.shape, bool)
    memory.check(to, wanted, LANE, reads=False)
    lanes = np.stack(words, 1).astype(np.int32)
    for address, lane, goes in zip(to.tolist(), lanes, wanted.tolist()):
        if goes:
            ctypes.memmove(address, lane.tobytes(), LANE)
    return [np.zeros(to.shape, np.int32)]


def to_halves(_, values):
    low, high = (v.astype(np.float16).view(np.uint16).astype(np.uint32) for v in values)
    return [(low | high << 16).view(np.int32)]


def in_bf16(numbers):
    """Their bits."""
    bits = numbers.view(np.uint32).astype(np.uint64)
    rounded = bits + 0x7FFF + (bits >> 16 & 1) >> 16
    return np.where(np.isnan(numbers), 0x7FFF, rounded).astype(np.uint16)


def to_bf16(_, values):
    low, *high = (in_bf16(v).astype(np.uint32) for v in values)
    return [(low | high[0] << 16 if high else low << 16).view(np.int32)]


def prefetch(_, values):
    start, end = (int(v.item()) for v in values)
    if start < end:
        prefetched.append((start, end))
    return [np.zeros(1, np.int32)]


def log2(_, values):
    with np.errstate(divide="ignore", invalid="ignore"):
        return [np.log2(values[0]).view(np.int32)]


def power_of_two(_, values):
    with np.errstate(over="ignore", under="ignore"):
        found = np.exp2(values[0])
    return [np.where(found < np.finfo(np.float32).tiny, np.float32(0), found).view(np.int32)]


def inverse(_, values):
    return [(1 / values[0]).view(np.int32)]


def over_448(_, values):
    return [(values[0] / np.float32(448)).view(np.int32)]


INSTRUCTIONS = {
    "rcp.approx.ftz.f32": inverse,
    "0fC3E00000": over_448,
    "lg2.approx.f32": log2,
    "ex2.approx.ftz.f32": power_of_two,
    "cvt.rn.bf16x2.f32": to_bf16,
    "prefetch.global.L2": prefetch,
    ".shared .align": reserve,
    "%dynamic_smem_size": reserve_ring,
    "cp.async.commit_group": copy_group,
    "cp.async.wait_group": wait_group,
    "ld.global.v4.b32": load,
    "@there st.global.v4.b32": store,
    "cp.async.cg.shared.global": copy,
    "cp.async.wait_all": wait,
    "ld.shared.v4.b32": read,
    "st.global.L1::evict_first.v4.b32": write,
    "cvt.rn.f16x2.f32": to_halves,
}


def install():
    from triton.language import int1, int32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_inline_asm(self, asm, constraints, values, types, is_pure, pack):
        run = next(run for text, run in INSTRUCTIONS.items() if text in asm)
        return Results(TensorHandle(found, int32) for found in run(asm, [v.data for v in values]))

    InterpreterBuilder.create_inline_asm = create_inline_asm
    # As GPUs do: of a number and NaN, the number.
    InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    create_splat = InterpreterBuilder.create_splat

    def splat_of_bool(self, block, scalar):
        """The interpreter gives comparisons of int32 the type int32; loads reject such a mask since Triton 3.9."""
        return create_splat(self, block, TensorHandle(scalar.data, int1) if scalar.data.dtype == bool else scalar)

    InterpreterBuilder.create_splat = splat_of_bool
    guard()
    accelerate()
    count_in_tensors()
    compute_in_bf16()


MOST_TURNS = 9


class Program(threading.Thread):
    """One of a launch, which runs until it ends or waits for others. Only one runs at a time."""

    current = None

    def __init__(self, index, body):
        super().__init__(daemon=True)
        self.index, self.body, self.error, self.kept, self.ended = index, body, None, None, False
        self.turn, self.stop = threading.Semaphore(0), threading.Semaphore(0)
        self.start()

    def run(self):
        self.turn.acquire()
        try:
            self.body()
        except Exception as error:
            self.error = error
        self.ended = True
        self.stop.release()

    def wait(self):
        self.kept = shared.copy()
        self.stop.release()
        self.turn.acquire()
        shared[:] = self.kept

    def go_on(self):
        Program.current = self
        self.turn.release()
        self.stop.acquire()
        Program.current = None
        if self.error:
            raise self.error


def launch(function, grid, values, constexprs):
    """Runs a kernel with addresses for tensors. A program that waits for others, by adding nothing to a counter, lets them
    run."""
    from triton.runtime import interpreter

    body, builder = function.rewrite(), interpreter.interpreter_builder
    interpreter._patch_lang(body)
    arguments = [*map(interpreter._implicit_cvt, values)]
    builder.set_grid_dim(*grid)
    indices = itertools.product(*map(range, grid))
    if "arrived" not in function.arg_names:
        for index in indices:
            builder.set_grid_idx(*index)
            body(*arguments, **constexprs)
        return
    # Each starts when those ahead of it have ended or wait: a launch may have more programs than a process has threads.
    programs = (Program(index, lambda: body(*arguments, **constexprs)) for index in indices)
    for _ in range(MOST_TURNS):
        waiting = []
        for program in programs:
            builder.set_grid_idx(*program.index)
            program.go_on()
            waiting += [] if program.ended else [program]
        programs = waiting
    assert not programs, "programs wait forever"


def count_in_tensors():
    """Loops of kernels count in numbers of Triton's, not of Python's, if they do when compiled."""
    from triton.language import constexpr, int32, tensor
    from triton.runtime import interpreter

    import liger_ops.kernels as tables

    def counted(*bounds, **_):
        plain = [b.value if isinstance(b, constexpr) else b for b in bounds]
        if not any(isinstance(b, tensor) for b in plain):
            return range(*plain)
        numbers = range(*(int(b.handle.data.item()) if isinstance(b, tensor) else b for b in plain))
        return (tensor(interpreter.TensorHandle(np.array([i], np.int32), int32), int32) for i in numbers)

    tables.kernels()
    for path, module in list(sys.modules.items()):
        if path.startswith("liger_ops.kernels."):
            module.range = counted
    patch = interpreter._patch_lang

    def patch_with_range(function):
        scope = patch(function)
        interpreter.tl.range = counted
        return scope

    interpreter._patch_lang = patch_with_range


def compute_in_bf16():
    """NumPy has no such numbers: they are uint16 there. Converts them with one rounding, and computes in fp32."""
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, operate, multiply = (getattr(InterpreterBuilder, name) for name in ("cast_impl", "binary_op", "create_dot"))

    def wide(t):
        if t.dtype.scalar != bfloat16:
            return t
        return TensorHandle((t.data.astype(np.uint32) << 16).view(np.float32), float32)

    def narrow(numbers):
        return TensorHandle(in_bf16(np.ascontiguousarray(numbers, np.float32)), bfloat16)

    def cast_wide(self, x, dtype):
        return narrow(wide(x).data) if dtype.scalar == bfloat16 else cast(self, wide(x), dtype)

    def operate_in_wide(self, a, b, operation):
        found = operate(self, wide(a), wide(b), operation)
        is_number = a.dtype.scalar == bfloat16 and found.data.dtype != bool
        return narrow(found.data) if is_number else found

    def multiply_wide(self, a, b, *others):
        return multiply(self, wide(a), wide(b), *others)

    InterpreterBuilder.get_bf16 = lambda self, value: narrow([value])
    InterpreterBuilder.cast_impl, InterpreterBuilder.binary_op = cast_wide, operate_in_wide
    InterpreterBuilder.create_dot = multiply_wide
    InterpreterBuilder.create_fp_to_fp = lambda self, x, dtype, rounding: self.cast_impl(x, dtype)


def guard():
    from triton.runtime import interpreter

    executor, access = interpreter.GridExecutor, interpreter._interpreter
    prepare = executor._init_args_hst

    def prepare_and_hold(self, args, kwargs):
        found, named = prepare(self, args, kwargs)
        memory.hold(t for t in (*found, *named.values()) if hasattr(t, "data_ptr"))
        return found, named

    def load(at, mask, other, dtype):
        memory.check(at, mask, np.dtype(dtype).itemsize, reads=True)
        return access.load(at, mask, other, dtype)

    def store(at, value, mask):
        memory.check(at, mask, value.itemsize, reads=False)
        return access.store(at, value, mask)

    def atomic_rmw(op, at, value, mask, order):
        memory.check(at, mask, value.itemsize, reads=False)
        if Program.current and not value.any():
            Program.current.wait()
        return access.atomic_rmw(op, at, value, mask, order)

    def atomic_cas(at, expected, value, order):
        memory.check(at, True, value.itemsize, reads=False)
        return access.atomic_cas(at, expected, value, order)

    executor._init_args_hst = prepare_and_hold
    checked = {"load": load, "store": store, "atomic_rmw": atomic_rmw, "atomic_cas": atomic_cas}
    interpreter._interpreter = SimpleNamespace(**vars(access) | checked)


def accelerate():
    """Prepares triton.language once for each function, instead of for each call, and makes each type and shape once. The
    process must not compile, because triton.language stays prepared."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    patch, numpy_type = interpreter._patch_lang, interpreter._get_np_dtype
    patched, numpy_types = SimpleNamespace(restore=lambda: None), {}

    @functools.cache
    def patch_once(function):
        patch(function)
        return patched

    def numpy_type_of_elements(type):
        name = type.scalar.name
        if name not in numpy_types:
            numpy_types[name] = numpy_type(type.scalar)
        return numpy_types[name]

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, numpy_type_of_elements
    blocks, make_block, equal = {}, core.block_type.__init__, core.tuple.__eq__

    def initialize_block(self, element_ty, shape):
        numbers = [n.value if isinstance(n, core.constexpr) else n for n in shape]
        key = element_ty.name, *numbers
        if key not in blocks:
            make_block(self, element_ty, shape)
            self.sizes = core.constexpr(self.numel), core.tuple([core.constexpr(n) for n in numbers])
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    of_scalar = core.constexpr(1), core.tuple([])

    def initialize_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.sizes if type.is_block() else of_scalar

    core.block_type.__init__, core.tensor.__init__ = initialize_block, initialize_tensor
    core.tuple.__eq__ = lambda self, other: self is other or equal(self, other)
    unwrap = core._unwrap_if_constexpr
    plain = {int, float, bool, str, type(None), core.dtype, core.block_type, core.pointer_type, core.tensor}
    core._unwrap_if_constexpr = lambda o: o if type(o) in plain else unwrap(o)
    operands, numbers = TritonSemantic.binary_op_type_checking_impl, {}

    def operands_of_one_type(self, a, b, *options, **named):
        """A number beside a tensor becomes a tensor once for each type."""
        divides = options[3:] == (True,)
        if named or type(a) is not core.tensor or a.dtype.is_ptr() or divides and a.dtype.is_floating():
            return operands(self, a, b, *options, **named)
        if type(b) is core.tensor:
            return (a, b) if a.type.name == b.type.name else operands(self, a, b, *options)
        key = repr(b), a.type.name, options
        if key in numbers:
            return a, numbers[key]
        found, number = operands(self, a, b, *options)
        if found is a:
            numbers[key] = number
        return found, number

    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_blocks(self, a, b):
        one, two = (t.handle.data.shape if t.type.is_block() else () for t in (a, b))
        if len(one) != len(two) or not one or any(m != n and 1 not in (m, n) for m, n in zip(one, two)):
            return broadcast(self, a, b)
        shape = tuple(map(max, one, two))

        def whole(t):
            return core.tensor(self.builder.create_broadcast(t.handle, shape), core.block_type(t.dtype, [*shape]))

        return a if one == shape else whole(a), b if two == shape else whole(b)

    TritonSemantic.binary_op_type_checking_impl = operands_of_one_type
    TritonSemantic.broadcast_impl_value = broadcast_blocks
    # The check of overflows computes each sum of integers three times.
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
