"""How a measurement reads and travels."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

import howsmooth as hs
from howsmooth._util.guarantee import Guarantee
from howsmooth.errors import InvalidInput
from howsmooth.jacobians.algebra import IdentityJacobian
from howsmooth.jacobians.operator import Accuracy, MatrixOperator
from howsmooth.network.nodes import Attend, Parallel, Skip
from howsmooth.norms import Measurement, frobenius_norm, golub_kahan, operator_norm


def example(**changes: object) -> Measurement:
    fields: dict[str, object] = {
        "value": torch.tensor(3.2141),
        "lower": torch.tensor(3.21399).double(),
        "upper": torch.tensor(3.21704).double(),
        "confidence": 0.99,
        "norm": 2,
        "converged": torch.tensor(True),
        "products": 18,
        "method": "golub-kahan",
        "dtype": torch.float32,
        "seconds": 0.1,
    }
    return Measurement(**(fields | changes))  # type: ignore[arg-type]


def test_single_map_reads_as_one_line_with_bounds_rounded_outwards() -> None:
    assert str(example()) == (
        "‖J‖₂ = 3.214 (≥ 3.2139, ≤ 3.2171 with probability 99 %, rounding modelled; "
        "converged, 18 products, golub-kahan float32)"
    )


def test_missing_upper_bound_and_missing_convergence_are_said() -> None:
    text = repr(example(upper=torch.tensor(math.inf), confidence=0.0, converged=torch.tensor(False), norm=math.inf))
    assert text.startswith("‖J‖_∞ = 3.214 (≥ 3.2139, no upper bound, rounding modelled; not converged")


def test_batch_reads_as_one_line_with_range() -> None:
    matrix = torch.diag_embed(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert str(golub_kahan(MatrixOperator(matrix))) == (
        "‖J‖₂ of 3 maps = 2 … 6 (each ≥ lower, ≤ upper with probability 99 %, rounding modelled, "
        "upper/lower at most 1.0001; 3/3 converged, 5 products, golub-kahan float32)"
    )


def test_sampled_norm_has_chance_in_its_upper_end_alone() -> None:
    m = frobenius_norm(MatrixOperator(torch.eye(50)), exact_limit=0)
    assert "≥ 0.99999, ≤" in repr(m)
    assert repr(m).count("with probability 99 %") == 1
    assert m.lower <= m.value <= m.upper


def test_dictionary_survives_json_and_has_no_vectors_unless_asked() -> None:
    m = operator_norm(MatrixOperator(torch.eye(4).expand(2, 4, 4)), dense_limit=0, start=torch.ones(2, 4))
    plain = m.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["value"] == m.value.tolist()
    assert plain["upper"] == [None, None]
    assert plain["converged"] == [True, True]
    assert "left" not in plain
    assert m.right is not None
    assert m.to_dict(vectors=True)["right"] == m.right.double().tolist()


def test_norm_inf_is_a_word_in_json() -> None:
    assert operator_norm(MatrixOperator(torch.eye(4)), "inf").to_dict()["norm"] == "inf"


def test_float_of_a_batch_is_refused_with_advice() -> None:
    assert float(example()) == pytest.approx(3.2141)
    with pytest.raises(InvalidInput, match=r"\.value\.max"):
        float(operator_norm(MatrixOperator(torch.eye(4).expand(2, 4, 4))))


@pytest.mark.parametrize(
    ("f", "known"),
    [
        (hs.SelfAttention.random(8, heads=2), Guarantee.MODELLED),
        (lambda x: x.sin(), Guarantee.MEASURED),
        (Parallel(Skip(), Attend(hs.SelfAttention.random(8, heads=2))), Guarantee.MEASURED),
    ],
)
@pytest.mark.parametrize("norm", [2, 1, "fro", "token"])
def test_a_result_says_whether_rounding_is_modelled_or_was_measured(f: Any, known: Guarantee, norm: Any) -> None:
    m = hs.measure(f, torch.randn(5, 8), norm=norm)
    assert (m.rounding, m.lower_holds) == (known, known)
    for text in (repr(m), m._repr_html_()):
        assert m.ends() in text
        assert m.ends().endswith(known.words(m.confidence or 1.0))
    assert m.to_dict()["lower_holds"] == m.to_dict()["upper_holds"] == known.name.lower()


def test_no_end_of_a_measurement_is_proved() -> None:
    """The allowance of the solver for its own rounding is a model, whatever the operator states."""
    op = MatrixOperator(torch.eye(4), Accuracy(guarantee=Guarantee.PROVED))
    for norm in (2, 1, math.inf, "fro"):
        m = operator_norm(op, norm)  # type: ignore[arg-type]
        assert (m.lower_holds, m.upper_holds) == (Guarantee.MODELLED, Guarantee.MODELLED)
        assert "proved" not in repr(m)


def test_sums_products_and_adjoints_of_measured_rounding_are_measured() -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    function, bounded = hs.jacobian(torch.sin, x), IdentityJacobian.like(x)
    assert bounded.accuracy.guarantee is Guarantee.MODELLED
    for op in (function + bounded, bounded @ function, function.adjoint):
        assert op.accuracy.guarantee is Guarantee.MEASURED
