"""The operators registered from Python, as a torch meets them that no operator library was built for.

The copy of the package that lacks the library runs in processes of its own, which import this file too.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import OPCHECKS, assert_no_worse, check_one_graph, gradients, output_of, path_taken

import liger_ops

TESTS = Path(__file__).parent
PACKAGE = Path(liger_ops.__file__).parent


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """A folder with a package: the runtime, an operator library for another torch, and a broken one for this."""
    root = tmp_path_factory.mktemp("without")
    shutil.copytree(PACKAGE, root / "liger_ops", ignore=shutil.ignore_patterns("lib", "packs", "__pycache__"))
    (root / "liger_ops" / "packs").symlink_to(PACKAGE / "packs")
    libraries = root / "liger_ops" / "lib"
    libraries.mkdir()
    shutil.copy(PACKAGE / "lib" / "libliger_runtime.so", libraries)
    for minor in ("1.0", liger_ops._loader.torch_minor()):
        (libraries / f"libliger_ops_torch{minor}.so").write_bytes(b"not a library")
    return root


def call(copy: Path, function: str, *args: object) -> None:
    """Calls a function of this file where the operators come from Python."""
    code = "import liger_ops; assert liger_ops._loaded.library is None, liger_ops.__file__\n"
    code += f"import test_fallback; test_fallback.{function}(*{tuple(map(str, args))})"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(copy), str(TESTS)])}
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-c", code]
    # The working directory comes before PYTHONPATH.
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


DECLINED = """
import torch, warnings
warnings.simplefilter("error", RuntimeWarning)
import liger_ops
assert liger_ops._loaded == (None, {"every library": "LIGER_OPS_LIBRARY=0"}), liger_ops._loaded
x = torch.ones(2, 4, requires_grad=True)
torch.ops.liger.rms_norm(x).sum().backward()
assert liger_ops.launch_counts()["cpu"] == 2 and hasattr(torch.ops.liger, "_rms_norm_grad")
"""


PLANS = """
import itertools, json, torch, liger_ops
sizes = [(1, 100), (999, 50257), (4096, 128256), (16384, 151936)]
dtypes, budgets = (torch.float32, torch.float16, torch.bfloat16), (None, 2 << 30, 256 << 20)
print(json.dumps([
    torch.ops.liger._fused_linear_cross_entropy_plan(tokens, 64, classes, dtype, wanted, budget)
    for (tokens, classes), dtype, wanted, budget in itertools.product(sizes, dtypes, (0, 4, 8, 12, 28), budgets)
]))
"""


def test_both_plan_the_linear_loss_alike():
    assert json.loads(output_of(PLANS, LIGER_OPS_LIBRARY="0")) == json.loads(output_of(PLANS))


def test_a_library_that_fits_can_be_declined():
    """Nothing is wrong then, so nothing warns."""
    output_of(DECLINED, LIGER_OPS_LIBRARY="0")


# ---- The warning


def test_the_warning_is_given_once_and_lists_what_was_tried(copy):
    code = "import liger_ops, torch; torch.ops.liger.rms_norm(torch.ones(2, 8)); import liger_ops._loader"
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=copy, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "RuntimeWarning" in line]
    assert len(said) == 1, done.stderr
    minor = liger_ops._loader.torch_minor()
    for part in (
        f"no operator library fits torch {torch.__version__}",
        f"libliger_ops_torch1.0.so built for torch 1.0, installed is {torch.__version__}",
        f"libliger_ops_torch{minor}.so did not load: ",
        "pip install --no-build-isolation .",
    ):
        assert part in said[0]


# ---- The same names and schemas


def public_schemas() -> dict[str, str]:
    names = [
        name.removeprefix("liger::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("liger::")
    ]
    return {name: str(getattr(torch.ops.liger, name).default._schema) for name in names if not name.startswith("_")}


def autocast_rules() -> dict[str, list[str]]:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return {
        name: [key for key in ("CUDA", "CPU") if has(f"liger::{name}", f"Autocast{key}")] for name in public_schemas()
    }


def write_registration(path: str) -> None:
    torch.save((public_schemas(), autocast_rules()), path)


def test_schemas_and_autocast_rules_are_those_of_the_library(copy, tmp_path):
    call(copy, "write_registration", tmp_path / "registration")
    schemas, rules = torch.load(tmp_path / "registration")
    assert schemas == public_schemas()
    assert rules == autocast_rules()


# ---- The same results


def calls(device: str) -> Iterator[tuple]:
    """(name, function, inputs, gradients of its outputs): options, layouts, empties, frozen inputs."""
    yield from norm_calls(device)
    yield from gated_calls(device)
    yield from embedding_calls(device)
    yield from loss_calls(device)


def norm_calls(device: str) -> Iterator[tuple]:
    ops, generator = torch.ops.liger, torch.Generator().manual_seed(0)

    def randn(shape, dtype, requires_grad=True):
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(requires_grad)

    dtypes = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)]
    for (dtype, parameter_dtype), shape, n in itertools.product(dtypes, [(2, 3), (0,)], [0, 64, 131, 2560, 40_000]):
        x, residual, dy, ds = (randn((*shape, n), dtype) for _ in range(4))
        dy, ds = dy.detach(), ds.detach()
        w, b = (randn(n, parameter_dtype) for _ in range(2))
        name = f"{shape} x {n}, {dtype}, parameters {parameter_dtype}"
        for options in (
            dict(casting_mode="llama"),
            dict(casting_mode="gemma", offset=1.0, eps=1e-5),
            dict(casting_mode="none"),
        ):
            for weight in (w, w.detach(), None):
                plain = lambda x, w, options=options: ops.rms_norm(x, w, **options)  # noqa: E731
                fused = lambda x, r, w, options=options: ops.fused_add_rms_norm(x, r, w, **options)  # noqa: E731
                yield f"rms_norm {options}, {name}", plain, [x, weight], [dy]
                yield f"fused_add_rms_norm {options}, {name}", fused, [x, residual, weight], [dy, ds]
        for weight, bias in itertools.product((w, w.detach(), None), (b, b.detach(), None)):
            yield f"layer_norm, {name}", lambda x, w, b: ops.layer_norm(x, w, b, 1e-5), [x, weight, bias], [dy]
        t, dt = randn((n, 6), dtype).detach().t().requires_grad_(), randn((n, 6), dtype, False).t()
        yield f"rms_norm, transposed, {name}", ops.rms_norm, [t, w], [dt]
        yield f"fused_add_rms_norm, transposed, {name}", ops.fused_add_rms_norm, [t, t.detach(), w], [dt, dt]
        yield f"layer_norm, transposed, {name}", ops.layer_norm, [t, w, b], [dt]


def gated_calls(device: str) -> Iterator[tuple]:
    ops, generator = torch.ops.liger, torch.Generator().manual_seed(0)
    forms = {
        "swiglu": (ops.swiglu, ops.swiglu_packed, ops.swiglu_linear, [{}]),
        "geglu": (ops.geglu, ops.geglu_packed, ops.geglu_linear, [dict(approximate=a) for a in ("tanh", "none")]),
    }

    def randn(*shape):
        return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()

    for dtype, shape in itertools.product((torch.float32, torch.bfloat16), [(2, 3, 64), (5, 131), (0, 8), (5, 0)]):
        n = shape[-1]
        gate, up, packed, weight, bias = (
            randn(*shape),
            randn(*shape),
            randn(*shape[:-1], 2 * n),
            randn(24, n),
            randn(24),
        )
        grad, narrow = randn(*shape).detach(), randn(*shape[:-1], 24).detach()
        for op, (plain, of_packed, linear, choices) in forms.items():
            for options in choices:
                name = f"{op} {options}, {shape}, {dtype}"
                bind = lambda f, options=options: lambda *t: f(*t, **options)  # noqa: E731
                yield name, bind(plain), [gate, up], [grad]
                yield f"{name}, packed", bind(of_packed), [packed], [grad]
                for w, b in ((weight, bias), (weight, None), (weight.detach(), bias), (weight.detach(), None)):
                    yield f"{name}, linear", bind(linear), [gate, up, w, b], [narrow]
                yield f"{name}, linear, frozen", bind(linear), [gate.detach(), up.detach(), weight, None], [narrow]


def embedding_calls(device: str) -> Iterator[tuple]:
    generator = torch.Generator().manual_seed(0)
    for dtype, rows, n in itertools.product((torch.float32, torch.bfloat16), (6, 4000), (8, 5)):
        weight, dout = (torch.randn(k, n, generator=generator).to(device, dtype) for k in (50, rows))
        input = torch.randint(50, (rows,), generator=generator).to(device)
        for padding_idx in (None, 3, -1):
            op = lambda w, i=input, p=padding_idx: torch.ops.liger.embedding(i.to(w.device), w, p)  # noqa: E731
            yield f"embedding {rows}, {n}, {dtype}, {padding_idx}", op, [weight.requires_grad_()], [dout]


LOSS_OPTIONS = (
    {},
    dict(reduction="sum", label_smoothing=0.1, weighted=True),
    dict(reduction="none", lse_square_scale=1e-3, softcap=5.0),
    dict(lse_square_scale=1e-2, label_smoothing=0.2, weighted=True),
    dict(ignore_index=3, softcap=2.0),
)


def fused_options(weighted: bool = False, **options) -> Iterator[dict]:
    """Whole and in chunks, with what the linear forms alone have."""
    yield options
    yield options | dict(memory_budget=15_000)
    yield options | dict(memory_budget=15_000, logits_scale=0.5, weigh_tokens=True)


def loss_calls(device: str) -> Iterator[tuple]:
    """In the metrics' form, whose loss is that of the others too."""
    ops, generator = torch.ops.liger, torch.Generator().manual_seed(0)
    n, hidden = 131, 24

    def randn(*shape, scale=1.0):
        return torch.randn(shape, generator=generator) * scale

    def prepared(x, y, weight):
        y = y.to(x.device)
        return y, None if weight is None else weight.to(x.device, torch.promote_types(x.dtype, torch.float32))

    def as_floats(loss, z_loss, accuracy, predicted):
        return loss, z_loss, accuracy, predicted.to(loss.dtype)

    for dtype, shape in itertools.product((torch.float32, torch.bfloat16, torch.float16), [(2, 37), (0,)]):
        y = torch.randint(n, shape, generator=generator)
        y = torch.where(torch.rand(shape, generator=generator) < 0.2, -100, y)
        class_weight, token_weight, each = randn(n).abs(), randn(*shape).abs(), randn(*shape)
        logits, x, w, b = (
            t.to(device, dtype).requires_grad_()
            for t in (randn(*shape, n, scale=3.0), randn(*shape, hidden), randn(n, hidden), randn(n))
        )
        for options in LOSS_OPTIONS:
            grad = each if options.get("reduction") == "none" else torch.tensor(0.7)
            grads = [grad.to(device)] * 4
            named = {k: v for k, v in options.items() if k != "weighted"}
            weight = class_weight if "weighted" in options else None
            targets = y.masked_fill(y < 0, named.get("ignore_index", -100))

            def plain(logits, targets=targets, weight=weight, named=named):
                y, weight = prepared(logits, targets, weight)
                return as_floats(*ops.cross_entropy_with_metrics(logits, y, weight, **named))

            yield f"cross_entropy {options}, {shape}, {dtype}", plain, [logits], grads
            for fused in fused_options(**options):
                tokens = token_weight if fused.pop("weigh_tokens", False) else None

                def linear(x, w, b, form, fused=fused, tokens=tokens, targets=targets, weight=weight):
                    y, weight = prepared(x, targets, weight)
                    tokens = None if tokens is None else tokens.to(x.device)
                    return form(x, w, y, b, weight, token_weight=tokens, **fused)

                with_metrics = lambda x, w, b, linear=linear: as_floats(  # noqa: E731
                    *linear(x, w, b, ops.fused_linear_cross_entropy_with_metrics)
                )
                with_log_probs = lambda x, w, b, linear=linear: linear(  # noqa: E731
                    x, w, b, ops.fused_linear_cross_entropy_with_log_probs
                )
                name = f"fused_linear_cross_entropy {fused}, {shape}, {dtype}"
                yield f"{name}, metrics", with_metrics, [x, w, b], grads
                yield f"{name}, log_probs", with_log_probs, [x, w, None], grads
                yield f"{name}, frozen", with_metrics, [x, w.detach(), b.detach()], grads
                yield f"{name}, weight alone", with_metrics, [x.detach(), w, None], grads
                yield f"{name}, no gradient", with_metrics, [x.detach(), w.detach(), None], grads
        if dtype != torch.float16:
            t = w.detach().t().contiguous().t().requires_grad_()
            yield (
                f"fused_linear_cross_entropy, transposed weight, {shape}, {dtype}",
                lambda x, w, y=y: ops.fused_linear_cross_entropy(x, w, y.to(x.device), memory_budget=15_000),
                [x, t],
                [torch.tensor(0.7, device=device)],
            )


def write_results(path: str, device: str) -> None:
    with path_taken(device):
        results = [[t.detach().cpu() for t in gradients(*rest)] for _, *rest in calls(device)]
    torch.save(results, path)


def test_results_are_those_of_the_library(copy, tmp_path, device):
    call(copy, "write_results", tmp_path / "results", device)
    count = 0
    for theirs, (name, function, inputs, grads_out) in zip(
        torch.load(tmp_path / "results"), calls(device), strict=True
    ):
        ours = [t.detach().cpu() for t in gradients(function, inputs, grads_out)]
        double = [None if t is None else t.detach().cpu().double().requires_grad_(t.requires_grad) for t in inputs]
        exact = gradients(function, double, [g.cpu() for g in grads_out])
        scale = max((float(g.abs().max()) for g in grads_out if g.numel()), default=0.0)
        assert len(ours) == len(theirs)
        for i, results in enumerate(zip(theirs, ours, exact)):
            # The mean over no rows.
            assert all(torch.equal(t.isnan(), results[0].isnan()) for t in results), f"{name}, result {i}"
            results = [t.nan_to_num() for t in results]
            assert_no_worse(f"{name}, result {i}", *results, scale=scale)
        count += 1
    assert count > 0


# ---- The same manners


def examples(device: str) -> list[tuple]:
    def randn(*shape):
        return torch.randn(shape, device=device, requires_grad=True)

    def transposed(*shape):
        return torch.randn(shape[::-1], device=device).t().requires_grad_()

    def targets(rows):
        return torch.randint(16, (rows,), device=device)

    ops = torch.ops.liger
    return [
        example
        for rows in (randn, transposed)
        for example in (
            (ops.rms_norm, (rows(4, 16), randn(16))),
            (ops.rms_norm, (rows(4, 16), None)),
            (ops.fused_add_rms_norm, (rows(4, 16), rows(4, 16), randn(16))),
            (ops.layer_norm, (rows(4, 16), randn(16), randn(16))),
            (ops.layer_norm, (rows(4, 16), None, randn(16))),
            (ops.swiglu, (rows(4, 16), rows(4, 16))),
            (ops.swiglu_packed, (rows(4, 16),)),
            (ops.swiglu_linear, (rows(4, 16), rows(4, 16), rows(16, 16), randn(16))),
            (ops.geglu_linear, (rows(4, 16), rows(4, 16), rows(16, 16))),
            (ops.embedding, (targets(4), rows(16, 8), 3)),
            (ops.cross_entropy, (rows(4, 16), targets(4))),
            (ops.cross_entropy_with_metrics, (rows(4, 16), targets(4))),
            (ops.fused_linear_cross_entropy, (rows(4, 16), rows(16, 16), targets(4), randn(16))),
            (ops.fused_linear_cross_entropy, (rows(4, 16), rows(16, 16).detach(), targets(4))),
            (ops.fused_linear_cross_entropy_with_metrics, (rows(4, 16), randn(16, 16), targets(4))),
            (
                ops.fused_linear_cross_entropy_with_log_probs,
                (rows(4, 16), randn(16, 16), targets(4), None, None, "none"),
            ),
        )
    ]


def check_opcheck(device: str) -> None:
    for op, inputs in examples(device):
        torch.library.opcheck(op.default, inputs, test_utils=OPCHECKS)
        frozen = tuple(t.detach() if isinstance(t, torch.Tensor) else t for t in inputs)
        torch.library.opcheck(op.default, frozen, test_utils=OPCHECKS)


def test_opcheck(copy, device):
    call(copy, "check_opcheck", device)


def check_compile(device: str) -> None:
    for op, inputs in examples(device):
        if any(part in op.default.name() for part in ("cross_entropy", "linear", "packed", "embedding")):
            continue
        outputs = 2 if op is torch.ops.liger.fused_add_rms_norm else 1

        def sized(rows, n, inputs=inputs):
            shapes = [None if t is None else (rows, n)[2 - t.dim() :] for t in inputs]
            return [
                None if shape is None else torch.randn(shape, device=device, requires_grad=True) for shape in shapes
            ]

        sizes = [(4, 64), (6, 128), (10, 256)]
        made = [(sized(*size), [torch.randn(size, device=device)] * outputs) for size in sizes]

        def double(*inputs, op=op):
            out = op(*inputs)
            return tuple(o * 2 for o in out) if isinstance(out, tuple) else out * 2

        torch._dynamo.reset()
        check_one_graph(double, made)


def test_compile_makes_one_graph_for_all_sizes(copy, device):
    call(copy, "check_compile", device)


def autocast_calls(device: str) -> Iterator[tuple]:
    """Those and operands of two dtypes, which autocast promotes."""
    ops = torch.ops.liger
    full = torch.ones(2, 3, 4, 16, device=device)
    half, angles = full.bfloat16(), full[0, 0]
    for a, b in ((half, full), (full, half)):
        for op, rest in {
            ops.swiglu: [], ops.geglu: [], ops.rope: [angles, angles], ops.fused_add_rms_norm: [half[0, 0, 0]]
        }.items():  # fmt: skip
            yield f"{op}, {a.dtype}, {b.dtype}", op, [a, b, *rest]
    yield from calls(device)


def write_autocast_results(path: str, device: str) -> None:
    with torch.autocast(device, torch.bfloat16):
        torch.save([call[1](*call[2]) for call in autocast_calls(device)], path)


def test_autocast_is_that_of_the_library(copy, tmp_path, device):
    call(copy, "write_autocast_results", tmp_path / "results", device)
    with torch.autocast(device, torch.bfloat16):
        expected = [call[1](*call[2]) for call in autocast_calls(device)]
    for theirs, ours in zip(torch.load(tmp_path / "results"), expected, strict=True):
        pairs = zip(theirs, ours) if isinstance(ours, tuple) else [(theirs, ours)]
        assert all(a.dtype == b.dtype for a, b in pairs)


def check_compiled_losses(device: str) -> None:
    ops = torch.ops.liger
    for op, linear, outputs in (
        (ops.cross_entropy, False, 1),
        (ops.fused_linear_cross_entropy, True, 1),
        (ops.fused_linear_cross_entropy_with_log_probs, True, 3),
    ):

        def sized(rows, n, linear=linear):
            shapes = [(rows, n), (2 * n, n), (2 * n,)] if linear else [(rows, n)]
            x, *rest = (torch.randn(shape, device=device, requires_grad=True) for shape in shapes)
            y = torch.randint(n, (rows,), device=device)
            return [x, rest[0], y, rest[1]] if linear else [x, y]

        def double(*inputs, op=op):
            out = op(*inputs)
            return (out[0] * 2, *out[1:]) if isinstance(out, tuple) else out * 2

        made = [(sized(*size), [torch.tensor(0.7, device=device)] * outputs) for size in ((4, 64), (6, 128), (10, 256))]
        torch._dynamo.reset()
        check_one_graph(double, made)


def test_compile_makes_one_graph_for_losses(copy, device):
    call(copy, "check_compiled_losses", device)


def check_linear_autocast(device: str) -> None:
    x, w, b = (torch.randn(shape, device=device, requires_grad=True) for shape in ((6, 16), (40, 16), (40,)))
    y = torch.randint(40, (6,), device=device)
    halves = [t.detach().bfloat16().requires_grad_() for t in (x, w, b)]
    with torch.autocast(device, torch.bfloat16):
        loss = torch.ops.liger.fused_linear_cross_entropy(x, w, y, b)
    expected = torch.ops.liger.fused_linear_cross_entropy(*halves[:2], y, halves[2])
    assert torch.equal(loss, expected)
    for got, other in zip(torch.autograd.grad(loss, (x, w, b)), torch.autograd.grad(expected, halves)):
        assert got.dtype == torch.float32 and torch.equal(got, other.float())


def test_autocast(copy, device):
    call(copy, "check_linear_autocast", device)


def linear_refusals() -> list[tuple]:
    ones, y = torch.ones, torch.zeros(2, dtype=torch.long)
    op = torch.ops.liger.fused_linear_cross_entropy
    x, w = ones(2, 8), ones(5, 8)
    named = (
        dict(bias=ones(4)), dict(bias=ones(5).half()), dict(ce_weight=ones(4)), dict(ce_weight=ones(5).half()),
        dict(ce_weight=ones(5, requires_grad=True)), dict(token_weight=ones(3)), dict(token_weight=y),
        dict(reduction="no"), dict(label_smoothing=2.0), dict(softcap=0.0), dict(lse_square_scale=float("inf")),
        dict(logits_scale=float("nan")), dict(memory_budget=0), dict(memory_budget=50),
    )  # fmt: skip
    return [
        (op, (x.long(), w, y), {}),
        (op, (x, w.half(), y), {}),
        (op, (x, ones(5, 7), y), {}),
        (op, (x, w, y.float()), {}),
        (op, (x, w, y[:1]), {}),
        (op, (x, w, y + 5), {}),
        (torch.ops.liger.cross_entropy, (x, y + 8), {}),
        (torch.ops.liger.cross_entropy, (x, y, ones(7)), {}),
        *((op, (x, w, y), options) for options in named),
        (op, (x.clone().requires_grad_(), w, y), dict(memory_budget=140)),
    ]


def complaints() -> list[str]:
    """What the losses say, as far as the wording is bound to be the same: all but what they got."""
    said = []
    for op, inputs, options in linear_refusals():
        name = op.default.name().removeprefix("liger::")
        with pytest.raises(RuntimeError, match=rf"{name}: \w+ must .* \(got ") as caught:
            op(*inputs, **options)
        said.append(str(caught.value).split("must")[0])
    return said


def write_complaints(path: str) -> None:
    torch.save(complaints(), path)


def test_losses_refuse_what_the_library_refuses(copy, tmp_path):
    call(copy, "write_complaints", tmp_path / "complaints")
    assert torch.load(tmp_path / "complaints") == complaints()


def check_refusals() -> None:
    ones, ops = torch.ones, torch.ops.liger
    heads = ones(1, 2, 4, 8).double()
    for op, inputs in (
        (ops.rms_norm, (ones(2, 8, dtype=torch.long),)),
        (ops.rms_norm, (ones(2, 8), ones(7))),
        (ops.rms_norm, (ones(2, 8), None, -1.0)),
        (ops.rms_norm, (ones(2, 8), None, 1e-6, 0.0, "no")),
        (ops.fused_add_rms_norm, (ones(2, 8), ones(8))),
        (ops.fused_add_rms_norm, (ones(2, 8), ones(2, 8).half())),
        (ops.layer_norm, (torch.tensor(1.0),)),
        (ops.layer_norm, (ones(2, 8), ones(8).half())),
        (ops.layer_norm, (ones(2, 8).half(), ones(8).half(), ones(8))),
        (ops.layer_norm, (ones(2, 8), None, None, float("inf"))),
        (ops.rms_norm, (ones(2, 8).double(), ones(8))),
        (ops.fused_add_rms_norm, (ones(2, 8).double(), ones(2, 8).double(), ones(8))),
        (ops.layer_norm, (ones(2, 8).double(), None, ones(8))),
        (ops.rope, (heads, heads, ones(4, 8), ones(4, 8))),
        (ops.rope_freqs_cis, (heads, heads, ones(4, 4, dtype=torch.complex64))),
        (ops.cross_entropy, (ones(2, 8).double(), ones(2).long(), ones(8))),
    ):
        name = op.default.name().removeprefix("liger::")
        with pytest.raises(RuntimeError, match=rf"{name}: \w+ must .* \(got "):
            op(*inputs)


def test_bad_input_is_refused(copy):
    call(copy, "check_refusals")


def check_no_double_backward() -> None:
    ops, targets = torch.ops.liger, torch.arange(4)
    logits, q = (torch.randn(shape, requires_grad=True) for shape in ((4, 16), (1, 2, 4, 16)))
    angles, turns = torch.randn(4, 16), torch.randn(4, 8, dtype=torch.complex64)
    name_of = lambda op: op.default.name().removeprefix("liger::").split("_with_")[0]  # noqa: E731
    calls = [(name_of(op), op, inputs) for op, inputs in examples("cpu")]
    calls += [
        ("cross_entropy_", lambda logits: ops.cross_entropy_(logits * 1.0, targets), (logits,)),
        ("rope", ops.rope, (q, q, angles, angles)),
        ("rope_freqs_cis", ops.rope_freqs_cis, (q, q, turns)),
    ]
    for name, function, inputs in calls:
        out = function(*inputs)
        out = out[0] if isinstance(out, tuple) else out
        # The gradient of a linear operator depends on what arrives alone.
        out = out.square() if name in ("embedding", "rope", "rope_freqs_cis") else out
        learned = [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]
        for gradient in torch.autograd.grad(out.sum(), learned, create_graph=True):
            with pytest.raises(RuntimeError, match=f"^{name}: double backward is not supported"):
                torch.autograd.grad(gradient.sum(), learned[0], retain_graph=True)


def test_double_backward_is_refused(copy):
    call(copy, "check_no_double_backward")


def check_a_model() -> None:
    from language_models import make, nodes, step, tokens

    from liger_ops import projections
    from liger_ops.transformers import apply_liger_kernel

    projections.LARGE = 0
    model, ids = make("llama"), tokens()
    plain = step(model, ids)
    assert not apply_liger_kernel(model).left_alone
    assert "_ProjectionsBackward" in nodes(model(input_ids=ids, labels=ids).loss)
    ours = step(model, ids)
    torch.testing.assert_close(ours[0], plain[0])
    for name, gradient in plain[1].items():
        torch.testing.assert_close(ours[1][name], gradient, rtol=1e-3, atol=1e-5)


def test_a_model_trains(copy):
    call(copy, "check_a_model")
