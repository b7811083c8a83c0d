"""Conversion to FP8: what is converted, what is left and why, and that a state dict stays an ordinary one."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from torch import nn

from fp8stack import device
from fp8stack.device import Detected
from fp8stack.formats import UnsupportedDtype
from fp8stack.kernels import launch
from fp8stack.kernels.scaled_mm import scaled_mm
from fp8stack.kernels.tensorwise import quantize_tensorwise
from fp8stack.linear import RECIPES, Float8Linear, Linear, convert_to_float8
from fp8stack.metrics import CodeCounter
from fp8stack.models import HIGH_PRECISION, MODELS, Transformer
from fp8stack.moe import EXPERT_RECIPES, GroupedExperts
from suites.compare import assert_bits_equal


class Three(nn.Module):
    """pytorch/torchtitan#1391's shape of model: one linear that FP8 takes, one small, one odd."""

    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Linear(64, 64)
        self.small = nn.Linear(64, 32, bias=False)
        self.odd = nn.Linear(32, 17)


def simulated(arch: str) -> Detected:
    row = device.lookup(arch)
    return Detected(arch=row, target=device.lookup("cpu"), reason="chosen by the test", simulated=True)


def test_converts_exactly_what_it_reports() -> None:
    """The converted list is the filter's answer; what is left says why (pytorch/torchtitan#1391)."""
    model = Three()
    report = convert_to_float8(model, "rowwise", filter=("small",), detected=simulated("gfx942"))
    assert report.converted == ("big",)
    assert report.left == {"small": "filter 'small'", "odd": "N = 17 not a multiple of 16"}
    assert (report.e4m3, report.e5m2) == ("e4m3fnuz", "e5m2fnuz")
    assert isinstance(model.big, Float8Linear)
    assert type(model.small) is nn.Linear
    assert type(model.odd) is nn.Linear
    text = str(report)
    assert all(word in text for word in ("1 linears", "small (filter 'small')", "odd", "chosen by the test"))


def test_head_and_embedding_of_a_transformer_stay() -> None:
    """All seven linears of every block are converted; embedding and output head are not."""
    with torch.device("meta"):
        model = Transformer(MODELS["llama3-tiny"])
    report = convert_to_float8(model, "rowwise", filter=HIGH_PRECISION, detected=simulated("cpu"))
    assert len(report.converted) == 7 * 4
    assert report.left == {"output": "filter 'output'"}
    assert all(name.startswith("layers.") for name in report.converted)


@pytest.mark.parametrize(
    ("names", "left"),
    [
        pytest.param(("attention.wk",), 4, id="linear-filter-run-of-components"),
        pytest.param(("layers.0",), 7, id="linear-filter-layer"),
        pytest.param(("feed_forward", "layers.1.attention"), 12 + 4, id="linear-filter-two"),
    ],
)
def test_filter_matches_whole_components(names: tuple[str, ...], left: int) -> None:
    """A name matches whole dotted components, wherever they stand."""
    with torch.device("meta"):
        model = Transformer(MODELS["llama3-tiny"])
    report = convert_to_float8(model, "rowwise", filter=names, detected=simulated("cpu"))
    assert left == len(report.left)


@pytest.mark.parametrize(
    "name", [pytest.param(n, id=f"linear-filter-{i}") for i, n in enumerate(("bigg", "bi", "odd.x", ""))]
)
def test_filter_name_that_matches_nothing(name: str) -> None:
    """A filter name that matches no linear is an error that names it; a part of a component does not match."""
    with pytest.raises(ValueError, match=rf"'{name}' matches no linear.*big"):
        convert_to_float8(Three(), "rowwise", filter=(name,), detected=simulated("cpu"))


# The recipes as they are specified, typed: left and right operand of output, grad input and grad weight; powers of two.
RECIPE_TABLE = {
    "tensorwise": (
        ("tensor e4m3", "tensor e4m3"),
        ("tensor e5m2", "tensor e4m3"),
        ("tensor e5m2", "tensor e4m3"),
        False,
    ),
    "rowwise": (("row e4m3", "row e4m3"), ("row e4m3", "row e4m3"), ("row e4m3", "row e4m3"), True),
    "rowwise_with_gw_hp": (("row e4m3", "row e4m3"), ("row e4m3", "tensor e4m3"), None, True),
    "blockwise": (
        ("1x128 e4m3", "128x128 e4m3"),
        ("1x128 e4m3", "128x128 e4m3"),
        ("1x128 e4m3", "1x128 e4m3"),
        False,
    ),
    "mxfp8": (("1x32 e4m3", "1x32 e4m3"), ("1x32 e4m3", "1x32 e4m3"), ("1x32 e4m3", "1x32 e4m3"), True),
}


def test_recipe_table() -> None:
    """The recipes are those of the specification: every other test takes them as they are and would follow a change."""
    assert list(RECIPE_TABLE) == list(RECIPES) == [recipe.name for recipe in RECIPES.values()]
    for name, recipe in RECIPES.items():
        gemms = [
            None if gemm is None else tuple(f"{cast.granularity} {cast.kind}" for cast in (gemm.left, gemm.right))
            for gemm in (recipe.output, recipe.grad_input, recipe.grad_weight)
        ]
        assert RECIPE_TABLE[name] == (*gemms, recipe.pow2), name
        assert (recipe.fast_accum, recipe.fast_accum_gradients, recipe.scale_mode) == (True, False, "rceil"), name


def test_recipe_fields() -> None:
    """A rounding of E8M0 scales that does not exist is named; a recipe with another one runs with it."""
    with pytest.raises(ValueError, match=r"scale_mode is 'up'; expected one of: floor, ceil, even, rceil"):
        replace(RECIPES["mxfp8"], scale_mode="up")
    outputs = []
    for mode in ("rceil", "floor"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32))
        convert_to_float8(model, replace(RECIPES["mxfp8"], scale_mode=mode), detected=simulated("cpu"))
        outputs.append(model(torch.randn(8, 64)))
    assert not torch.equal(*outputs)


def test_fast_accumulation_is_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output alone accumulates fast by default; a field turns it off, another turns it on for both gradients."""
    asked = []

    def watched(*operands: torch.Tensor, **options: object) -> torch.Tensor:
        asked.append(options["fast_accum"])
        return scaled_mm(*operands, **options)

    monkeypatch.setattr("fp8stack.linear.scaled_mm", watched)
    for name in ("rowwise", "blockwise"):
        for fields, expected in (
            ({}, [True, False, False]),
            ({"fast_accum": False}, [False] * 3),
            ({"fast_accum_gradients": True}, [True] * 3),
        ):
            asked.clear()
            model = nn.Sequential(nn.Linear(32, 16))
            convert_to_float8(model, replace(RECIPES[name], **fields), detected=simulated("cpu"))
            model(torch.ones(16, 32, requires_grad=True)).sum().backward()
            assert expected == asked, f"{name} {fields}"


def test_mxfp8_on_a_fnuz_arch() -> None:
    """MX formats are OCP's: the refusal names recipe, format and arch, and nothing has been converted."""
    model = Three()
    with pytest.raises(UnsupportedDtype, match=r"'mxfp8' .* e4m3fnuz of gfx942 .*; expected .*; take rowwise"):
        convert_to_float8(model, "mxfp8", detected=simulated("gfx942"))
    assert type(model.big) is nn.Linear


def test_operands_get_the_formats_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """The three products of a tensorwise layer on MI300X get e4m3fnuz, and e5m2fnuz for the gradient alone."""
    pairs = []

    def watched(a: torch.Tensor, b: torch.Tensor, *scales: object, **options: object) -> torch.Tensor:
        pairs.append((a.dtype, b.dtype))
        return scaled_mm(a, b, *scales, **options)

    monkeypatch.setattr("fp8stack.linear.scaled_mm", watched)
    model = nn.Sequential(nn.Linear(32, 16))
    convert_to_float8(model, "tensorwise", detected=simulated("gfx942"))
    model(torch.ones(16, 32, requires_grad=True)).sum().backward()
    e4m3, e5m2 = torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
    assert pairs == [(e4m3, e4m3), (e5m2, e4m3), (e5m2, e4m3)]


@pytest.mark.parametrize("recipe", [pytest.param(name, id=f"linear-names-{name}") for name in ("blockwise", "mxfp8")])
def test_products_are_told_their_granularity(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few tokens are one block, whose scales look like those of rows: the layer says what they are."""
    told = []

    def watched(*operands: torch.Tensor, **options: object) -> torch.Tensor:
        told.append(options["granularity"])
        return scaled_mm(*operands, **options)

    monkeypatch.setattr("fp8stack.linear.scaled_mm", watched)
    model = nn.Sequential(nn.Linear(32, 16))
    convert_to_float8(model, recipe, detected=simulated("cpu"))
    model(torch.ones(16, 32, requires_grad=True)).sum().backward()
    blocks = ["1x128 128x128", "1x128 128x128", "1x128 1x128"]
    assert told == (blocks if recipe == "blockwise" else ["1x32"] * 3)


def test_unknown_recipe() -> None:
    """The error lists the recipes that exist."""
    with pytest.raises(ValueError, match=r"'rowise'.*rowwise, rowwise_with_gw_hp, tensorwise"):
        convert_to_float8(Three(), "rowise")


def test_nothing_converted_is_an_error() -> None:
    """An FP8 run without an FP8 layer would be a bf16 run under another name."""
    with pytest.raises(ValueError, match="converted nothing"):
        convert_to_float8(nn.Sequential(nn.Linear(17, 17)), "rowwise", detected=simulated("cpu"))
    with pytest.raises(ValueError, match="wrap it"):
        convert_to_float8(nn.Linear(16, 16), "rowwise", detected=simulated("cpu"))


@pytest.mark.parametrize("recipe", [pytest.param(name, id=f"linear-{name}") for name in RECIPES])
def test_state_dict_is_an_ordinary_one(recipe: str) -> None:
    """Keys and tensors are those of the high-precision model, and load with weights_only (pytorch/torchtitan#651)."""
    model = Three()
    parameters = dict(model.named_parameters())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    convert_to_float8(model, recipe, detected=simulated("cpu"))
    assert {name: id(p) for name, p in parameters.items()} == {name: id(p) for name, p in model.named_parameters()}
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert list(before) == list(loaded)
    for name, tensor in before.items():
        assert type(loaded[name]) is torch.Tensor
        assert torch.equal(tensor, loaded[name])
    Three().load_state_dict(loaded)


def test_input_errors() -> None:
    """A wrong width and a dtype that FP8 layers do not take are named."""
    model = Three()
    convert_to_float8(model, "rowwise", detected=simulated("cpu"))
    with pytest.raises(ValueError, match=r"48 features.*takes 64"):
        model.big(torch.zeros(2, 48))
    with pytest.raises(UnsupportedDtype, match="float64"):
        model.big(torch.zeros(2, 64, dtype=torch.float64))


def test_emulated_scales_are_reported() -> None:
    """The report says where E8M0 scales are no instruction's business, and nothing of it where they are."""
    for target, emulated in (("sm_90", True), ("gfx950", False), ("cpu", False)):
        found = Detected(device.lookup("gfx950"), device.lookup(target), "chosen by the test", target != "gfx950")
        report = convert_to_float8(nn.Sequential(nn.Linear(32, 16)), "mxfp8", detected=found)
        words = "(linears): E8M0 scales are emulated: sm_90 has no matrix instruction that takes them"
        assert (words in str(report)) == emulated, target


@pytest.mark.parametrize("recipe", [pytest.param(name, id=f"linear-inference-{name}") for name in RECIPES])
def test_inference_mode(recipe: str) -> None:
    """In inference mode, with a leading dimension and without gradients, the output has the bits of training's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32))
    convert_to_float8(model, recipe, detected=simulated("gfx950"))
    x = torch.randn(2, 12, 64).bfloat16()
    expected = model(x)
    with torch.inference_mode():
        assert_bits_equal(expected.detach(), model(x), recipe)


# --- dtypes and autocast ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [pytest.param(name, id=f"linear-fp16-{name}") for name in RECIPES])
def test_float16(recipe: str) -> None:
    """A float16 layer has the values of a float32 one on the same numbers, rounded to float16; gradients likewise."""
    torch.manual_seed(0)
    linear = nn.Linear(64, 32).half()
    wide = nn.Linear(64, 32)
    wide.load_state_dict({name: value.float() for name, value in linear.state_dict().items()})
    x, grad = torch.randn(2, 24, 64).half(), torch.randn(2, 24, 32).half()
    results = []
    for layer in (linear, wide):
        dtype = layer.weight.dtype
        model = nn.Sequential(layer)
        convert_to_float8(model, recipe, detected=simulated("gfx950"))
        given = x.to(dtype, copy=True).requires_grad_()
        y = model(given)
        assert y.dtype == given.dtype
        y.backward(grad.to(y.dtype))
        results.append((y, given.grad, model[0].weight.grad, model[0].bias.grad))
        assert {part.dtype for part in results[-1]} == {given.dtype}
    for narrow, full in zip(*results, strict=True):
        assert_bits_equal(full.detach().half(), narrow.detach(), recipe)


@pytest.mark.parametrize(
    "dtype",
    [pytest.param(torch.bfloat16, id="linear-autocast-bf16"), pytest.param(torch.float16, id="linear-autocast-fp16")],
)
@pytest.mark.parametrize("recipe", [pytest.param(name, id=name) for name in ("none", *RECIPES)])
def test_autocast(recipe: str, dtype: torch.dtype) -> None:
    """Under autocast a layer does as torch's linear: input, compute and output in its dtype, gradients in their own.

    Also compiled, also where the backward pass runs under autocast; float64 is left alone by torch, and refused here.
    """
    torch.manual_seed(0)
    model = nn.Sequential(Linear(64, 32))
    if recipe != "none":
        convert_to_float8(model, recipe, detected=simulated("gfx950"))
    layer = model[0]
    x, grad = torch.randn(24, 64), torch.randn(24, 32).to(dtype)
    torch._dynamo.reset()  # each recipe is a recompilation of one function
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")
    with torch.autocast("cpu", dtype=dtype):
        assert nn.functional.linear(x, layer.weight).dtype == dtype

    def run(call: nn.Module, given: torch.Tensor, on: bool, backward_on: bool = False) -> list[torch.Tensor]:
        layer.zero_grad()
        given = given.clone().requires_grad_()
        with torch.autocast("cpu", dtype=dtype, enabled=on):
            y = call(given)
        with torch.autocast("cpu", dtype=dtype, enabled=backward_on):
            y.backward(grad.to(y.dtype))
        assert layer.weight.grad.dtype == torch.float32
        return [y.detach(), given.grad, layer.weight.grad.clone(), layer.bias.grad.clone()]

    expected = run(layer, x.to(dtype), on=False)
    assert expected[0].dtype == dtype
    for call, backward_on in ((layer, False), (layer, True), (compiled, False)):
        found = run(call, x, on=True, backward_on=backward_on)
        assert found[1].dtype == torch.float32
        found[1] = found[1].to(dtype)
        for what, one, other in zip(("output", "input", "weight", "bias"), expected, found, strict=True):
            assert_bits_equal(one, other, f"{recipe}, {what}")
    if recipe != "none":
        with torch.autocast("cpu", dtype=dtype), pytest.raises(UnsupportedDtype, match="float64"):
            layer(x.double())


def test_counter_sees_every_operand() -> None:
    """Saturated and NaN codes of all six operands are counted, and taking the counts starts anew."""
    counter = CodeCounter()
    model = nn.Sequential(nn.Linear(32, 16, bias=False))
    convert_to_float8(model, "rowwise", detected=simulated("cpu"), counter=counter)
    with torch.no_grad():
        model[0].weight.fill_(448.0)
    x = torch.full((16, 32), -448.0, requires_grad=True)
    y = model(x)
    assert counter.take() == (16 * 32 + 16 * 32, 0)
    y.backward(torch.full((16, 16), 448.0))
    assert counter.take() == (2 * 16 * 16 + 16 * 32 + 16 * 32, 0)
    assert counter.take() == (0, 0)
    model(torch.full((16, 32), float("nan")))
    assert counter.take() == (16 * 32, 16 * 32)


def test_conversion_of_shared_and_peculiar_linears() -> None:
    """A linear in two places is one FP8 linear in both; subclasses and linears with hooks stay, with the reason."""

    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    shared, hooked = nn.Linear(32, 32), nn.Linear(32, 32)
    hooked.register_forward_hook(lambda *_: None)
    model = nn.ModuleDict({"a": shared, "b": shared, "doubled": Doubled(32, 32), "hooked": hooked})
    report = convert_to_float8(model, "rowwise", detected=simulated("gfx942"))
    assert report.converted == ("a", "b")
    assert model["a"] is model["b"]
    assert isinstance(model["a"], Float8Linear)
    assert "Doubled" in report.left["doubled"]
    assert "hooks" in report.left["hooked"]


def test_filter_is_a_sequence_of_names() -> None:
    """A text would be read letter by letter: refused, with the way out."""
    with pytest.raises(ValueError, match=r"pass \('output',\)"):
        convert_to_float8(nn.Sequential(nn.Linear(32, 32)), "rowwise", "output", detected=simulated("cpu"))


# --- replaced recipes, second conversions, what stays -----------------------------------------------------------------


def experts() -> GroupedExperts:
    """Two experts with weights from a seed."""
    found = GroupedExperts(2, 64, 32)
    generator = torch.Generator().manual_seed(0)
    for weight in found.parameters():
        nn.init.normal_(weight, generator=generator)
    return found


OFFS = torch.tensor([5, 16], dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "fields", "taken"),
    [
        pytest.param("rowwise", {"fast_accum": False}, {"fast_accum": False}, id="linear-experts-fast-accum"),
        pytest.param(
            "rowwise", {"fast_accum_gradients": True}, {"fast_accum_gradients": True}, id="linear-experts-gradients"
        ),
        pytest.param("rowwise", {"pow2": False}, {"pow2": False}, id="linear-experts-pow2"),
        pytest.param("tensorwise", {"pow2": True}, {"pow2": True}, id="linear-experts-pow2-tensorwise"),
        pytest.param("rowwise", {"grad_weight": None}, {"grad_weight": False}, id="linear-experts-gw-hp"),
        pytest.param("mxfp8", {"grad_weight": None}, {"grad_weight": False}, id="linear-experts-gw-hp-mxfp8"),
        pytest.param(
            "rowwise_with_gw_hp",
            {"grad_weight": RECIPES["rowwise"].grad_weight},
            {"grad_weight": True},
            id="linear-experts-gw-fp8",
        ),
        pytest.param("mxfp8", {"scale_mode": "floor"}, {"scale_mode": "floor"}, id="linear-experts-scale-mode"),
        pytest.param("rowwise", {"scale_mode": "floor"}, {}, id="linear-experts-no-scale-mode"),
    ],
)
def test_experts_take_replaced_fields(name: str, fields: dict[str, object], taken: dict[str, object]) -> None:
    """Experts run the recipe that was asked for, replaced fields included, and train with it."""
    model = nn.Sequential(experts())
    report = convert_to_float8(model, replace(RECIPES[name], **fields), detected=simulated("cpu"))
    assert report.converted == ("0",)
    assert model[0].plan.recipe == replace(EXPERT_RECIPES[name], **taken)
    model[0](torch.randn(16, 64, requires_grad=True), OFFS).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"output": RECIPES["blockwise"].output}, id="linear-experts-other-output"),
        pytest.param({"grad_input": RECIPES["tensorwise"].grad_input}, id="linear-experts-other-grad-input"),
        pytest.param({"grad_weight": RECIPES["mxfp8"].grad_weight}, id="linear-experts-other-grad-weight"),
    ],
)
def test_experts_refuse_other_casts(fields: dict[str, object]) -> None:
    """A cast that no grouped GEMM has leaves experts as they are, and the report names the GEMM."""
    model = nn.ModuleDict({"experts": experts(), "linear": nn.Linear(64, 64)})
    report = convert_to_float8(model, replace(RECIPES["rowwise"], **fields), detected=simulated("cpu"))
    assert report.converted == ("linear",)
    assert report.left == {"experts": f"experts run the casts of rowwise alone, and {next(iter(fields))} has others"}
    assert model["experts"].plan is None


def test_what_runs_in_fp8_stays() -> None:
    """A second conversion changes nothing that runs in FP8, says so, and converts the rest; a filter may name it."""
    model = nn.ModuleDict({"experts": experts(), "linear": nn.Linear(64, 64), "late": nn.Linear(64, 64)})
    convert_to_float8(model, "rowwise", filter=("late",), detected=simulated("cpu"))
    model["experts"].keep(saved_weight="codes")
    linear, plan = model["linear"], model["experts"].plan
    report = convert_to_float8(model, "mxfp8", filter=("linear",), detected=simulated("cpu"))
    assert report.converted == ("late",)
    assert report.left == dict.fromkeys(("experts", "linear"), "already FP8, recipe rowwise")
    assert model["linear"] is linear
    assert model["experts"].plan is plan
    assert "in high precision" not in str(report)
    with pytest.raises(ValueError, match=r"converted nothing; .*linear \(already FP8, recipe rowwise\)"):
        convert_to_float8(model, "rowwise", detected=simulated("cpu"))


def test_filter_wins_at_every_name_of_a_module() -> None:
    """A module with two names, one of them filtered, stays under both: the report says so of both."""
    shared, linear = experts(), nn.Linear(64, 64)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": linear, "d": linear, "e": nn.Linear(64, 64)})
    report = convert_to_float8(model, "rowwise", filter=("b", "d"), detected=simulated("cpu"))
    assert report.converted == ("e",)
    assert report.left == {"a": "filter 'b'", "b": "filter 'b'", "c": "filter 'd'", "d": "filter 'd'"}
    assert shared.plan is None
    assert model["c"] is model["d"] is linear


@pytest.mark.parametrize("padded", [False, True])
def test_encoder_evaluates_in_fp8(padded: bool) -> None:
    """torch's encoder layer, in eval() without gradients, reads its linears' weights for one fused op: not in FP8."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    report = convert_to_float8(model, "rowwise", detected=simulated("cpu"))
    assert set(report.notes) == {"layers.0", "layers.1"}
    x = torch.randn(2, 16, 64)
    mask = torch.arange(16).expand(2, 16) >= torch.tensor([[16], [12]]) if padded else None
    expected = model(x, src_key_padding_mask=mask).detach()
    with torch.no_grad(), launch.recording() as seen:
        found = model(x, src_key_padding_mask=mask)
    assert "scaled_mm" in seen
    assert float((found - expected).abs().max()) < 0.01  # torch's attention has a fused op too, and keeps it


HOOKS = {
    "forward": lambda linear: linear.register_forward_hook(lambda *_: None),
    "forward-pre": lambda linear: linear.register_forward_pre_hook(lambda *_: None),
    "backward": lambda linear: linear.register_full_backward_hook(lambda *_: None),
    "backward-pre": lambda linear: linear.register_full_backward_pre_hook(lambda *_: None),
    "state-dict": lambda linear: linear.register_state_dict_post_hook(lambda *_: None),
    "state-dict-pre": lambda linear: linear.register_state_dict_pre_hook(lambda *_: None),
    "load-pre": lambda linear: linear.register_load_state_dict_pre_hook(lambda *_: None),
    "load-post": lambda linear: linear.register_load_state_dict_post_hook(lambda *_: None),
}


@pytest.mark.parametrize("kind", [pytest.param(kind, id=f"linear-hook-{kind}") for kind in HOOKS])
def test_hooked_linears_stay(kind: str) -> None:
    """A linear with a hook of any kind stays, with the reason: the FP8 one would not run it."""
    model = nn.ModuleDict({"hooked": nn.Linear(32, 32), "plain": nn.Linear(32, 32)})
    HOOKS[kind](model["hooked"])
    report = convert_to_float8(model, "rowwise", detected=simulated("cpu"))
    assert report.converted == ("plain",)
    assert "hooks" in report.left["hooked"]


def test_linear_with_a_forward_of_its_own_stays() -> None:
    """A `forward` that was set on the instance is no plain linear's."""
    model = nn.ModuleDict({"own": nn.Linear(32, 32), "plain": nn.Linear(32, 32)})
    model["own"].forward = lambda x: x
    report = convert_to_float8(model, "rowwise", detected=simulated("cpu"))
    assert report.converted == ("plain",)
    assert report.left["own"].startswith("its forward was replaced")


# --- devices ----------------------------------------------------------------------------------------------------------


def test_devices_that_differ() -> None:
    """A weight or a bias elsewhere than the input is refused by name; on meta it would be multiplied as garbage."""
    for name in ("weight", "bias"):
        model = nn.Sequential(nn.Linear(32, 16))
        convert_to_float8(model, "rowwise", detected=simulated("cpu"))
        setattr(model[0], name, nn.Parameter(getattr(model[0], name).to("meta")))
        with pytest.raises(ValueError, match=f"input is on cpu and the {name} on meta; expected one device; move"):
            model(torch.ones(16, 32))


def test_meta_model_asks_for_detected() -> None:
    """A meta device has no arch: the error says how to name one."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 16))
    with pytest.raises(device.UnknownArch, match=r"on the meta device, .*; expected .*; pass detected="):
        convert_to_float8(model, "rowwise")


@pytest.mark.parametrize("recipe", [pytest.param(name, id=f"linear-meta-{name}") for name in RECIPES])
def test_meta_layer(recipe: str) -> None:
    """A layer on meta has the shapes and dtypes of its output and gradients, in bf16 and in float32."""
    for dtype in (torch.bfloat16, torch.float32):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(32, 16))
            x = torch.empty(24, 32, dtype=dtype, requires_grad=True)
        convert_to_float8(model, recipe, detected=simulated("cpu"))
        y = model(x)
        y.sum().backward()
        assert (y.device.type, y.dtype, tuple(y.shape)) == ("meta", dtype, (24, 16))
        assert (x.grad.shape, model[0].weight.grad.shape) == (x.shape, model[0].weight.shape)


# --- rows that are no multiple of 16 ----------------------------------------------------------------------------------


def test_tensorwise_gradient_is_quantised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With any number of rows dY is quantised once for both gradients, and its codes are counted once."""
    seen = []

    def watched(x: torch.Tensor, *arguments: object, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(tuple(x.shape))
        return quantize_tensorwise(x, *arguments, **options)

    monkeypatch.setattr("fp8stack.linear.quantize_tensorwise", watched)
    for rows in (16, 17):
        counter = CodeCounter()
        model = nn.Sequential(nn.Linear(32, 16, bias=False))
        convert_to_float8(model, "tensorwise", detected=simulated("cpu"), counter=counter)
        with torch.no_grad():
            model[0].weight.fill_(448.0)
        y = model(torch.full((rows, 32), -448.0, requires_grad=True))
        counter.take()
        seen.clear()
        y.backward(torch.full((rows, 16), 57344.0))
        assert sorted(seen) == sorted([(rows, 16), (16, 32), (rows, 32)])
        assert counter.take() == (rows * 16 + 16 * 32 + rows * 32, 0)


@pytest.mark.parametrize("recipe", [pytest.param(name, id=f"linear-rows-{name}") for name in RECIPES])
def test_rows_of_no_multiple(recipe: str) -> None:
    """17 rows have the bits of the same 17 and 15 of zeros, in the weight's gradient too."""
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn(17, 32, generator=generator), torch.randn(17, 16, generator=generator)
    found = []
    for rows in (17, 32):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 16, bias=False))
        convert_to_float8(model, recipe, detected=simulated("cpu"))
        given, out = (nn.functional.pad(part, (0, 0, 0, rows - 17)) for part in (x, grad))
        given.requires_grad_()
        model(given).backward(out)
        found.append((given.grad[:17], model[0].weight.grad))
    for one, other in zip(*found, strict=True):
        assert_bits_equal(one, other, recipe)


# --- wrong arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "names", "words"),
    [
        pytest.param(None, (), "^recipe is None; expected a Recipe or one of: .*rowwise.*; ", id="linear-recipe-none"),
        pytest.param("rowwise", None, "^filter is None; expected a sequence of names; ", id="linear-filter-none"),
        pytest.param("rowwise", (1,), r"^filter is \(1,\); expected a sequence", id="linear-filter-number"),
    ],
)
def test_wrong_arguments(recipe: object, names: object, words: str) -> None:
    """What is no recipe and what is no sequence of names is a ValueError in words."""
    with pytest.raises(ValueError, match=words):
        convert_to_float8(Three(), recipe, names, detected=simulated("cpu"))


def test_single_number() -> None:
    """A tensor without dimensions is no row."""
    model = Three()
    convert_to_float8(model, "rowwise", detected=simulated("cpu"))
    with pytest.raises(ValueError, match=r"^input is a single number; expected \(\.\.\., 64\); "):
        model.big(torch.tensor(1.0))
