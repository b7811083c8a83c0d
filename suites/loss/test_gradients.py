"""The gradient of every parameter is the same however ranks share the work: one rank, two, two that share the experts.

First step, same seed, same batch over all ranks; the norm of each parameter's gradient, and its products with two
seeded vectors. A loss curve shows none of this: a gradient that is not reduced, or that is divided by the wrong number,
AdamW divides away. The router's gate is the one that only the exchange can spoil: its gradient goes through the rows
that come back.

In float32 the comparison is one of sums in another order, and 1e-3 is a large number: norms, and products with the
vectors, agree to 1.1e-7 on a CPU and to 2.5e-6 on two H200s. In bf16, what the trainer runs, two things are added that
are no fault. A rank rounds its half of a gradient where one rank rounds the whole: on a CPU the worst norm, of a weight
of 64 elements, is 1.4e-3 apart, the routers' 3.4e-4; on two H200s, debug models, the worst is 6.7e-4. And where a
product of half as many rows takes other tiles, as on a GPU, a token near a tie chooses another expert, and the
gradients of router and experts have another token in them. So there the norms are held to what no missing sum and no
wrong factor (of 2, with two ranks) stays in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from fp8stack.config import TrainConfig
from suites.loss.test_loss import CONFIG, GPU_CONFIG
from suites.unit import ranks

Record = Callable[[str, object], None]

IN_FLOAT32, IN_BF16 = 1e-3, 3e-2
ON = {"cpu": ("llama3-tiny", "dsv3-tiny"), "cuda": ("llama3-debug", "dsv3-debug")}


def configurations(device: str) -> list[TrainConfig]:
    """The first step of a dense model and of one with experts."""
    first = dataclasses.replace(CONFIG if device == "cpu" else GPU_CONFIG, steps=1, compile="none")
    return [dataclasses.replace(first, model=model) for model in ON[device]]


@pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", id="2-ranks-of-a-cpu", marks=pytest.mark.requires("vendor:cpu")),
        pytest.param("cuda", id="2-gpus", marks=pytest.mark.requires(gpus=2)),
    ],
)
def test_gradients(device: str, record_property: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of two ranks, and of two that share the experts, are those of one: every parameter of both models."""
    monkeypatch.delenv("FP8STACK_ARCH", raising=False)
    dense, experts = configurations(device)
    alone = [(config, in_float32) for in_float32 in (True, False) for config in (dense, experts)]
    shared = [(dataclasses.replace(experts, expert_parallel=2), in_float32) for in_float32 in (True, False)]
    (one,) = ranks.run_ranks(ranks.first_gradients, alone, ranks=1)
    two, other = ranks.run_ranks(ranks.first_gradients, [*alone, *shared])
    assert two == other, "ranks: they report different numbers"

    wrong = []
    for (config, in_float32), (loss, digests), (expected_loss, expected) in zip(
        [*alone, *shared], two, [*one, one[1], one[3]], strict=True
    ):
        dtype, limit = ("float32", IN_FLOAT32) if in_float32 else ("bf16", IN_BF16)
        name = f"{config.model}_{dtype}" + ("_expert_parallel" if config.expert_parallel > 1 else "")
        assert digests.keys() == expected.keys(), name
        assert loss == pytest.approx(expected_loss, rel=1e-5 if in_float32 else 1e-3), name
        apart = {}
        for parameter, (norm, _, *dots) in expected.items():
            assert norm > 0, f"{name}: {parameter} has no gradient"
            ours, _, *our_dots = digests[parameter]
            apart[parameter] = abs(ours / norm - 1)
            if in_float32:
                apart[parameter] = max(abs(a - b) / norm for a, b in zip([ours, *our_dots], [norm, *dots], strict=True))
        worst = max(apart, key=lambda parameter: apart[parameter])
        routers = [value for parameter, value in apart.items() if ".router." in parameter]
        print(f"{name}: {apart[worst]:.1e} ({worst})" + (f", routers {max(routers):.1e}" if routers else ""))
        record_property(f"{name}_apart", apart[worst])
        wrong += [f"{name}: {p} is {value:.2e} apart" for p, value in apart.items() if not value <= limit]
    assert not wrong, "; ".join(wrong[:8])
