"""Programs and variables that an earlier version stored."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.serialization import from_state_dict, to_state_dict
from jax import export

from fbq_jax import recipes
from fbq_jax.core import serialization
from fbq_jax.core.qtensor import QTensor, quantize


def stored_earlier(recipe, **changes):
    """The JSON of a recipe with the fields that went, of which some are True."""
    kind, fields = json.loads(serialization._dumps(recipe))
    for name in ("fwd", "dlhs", "drhs"):
        fields[name][1] |= {"hadamard": False, "fallback": False}
    fields["drhs"][1] |= changes.get("drhs", {})
    fields |= {"equalize": changes.get("equalize", False)}
    return json.dumps([kind, fields]).encode()


@pytest.mark.parametrize("recipe", [recipes.jetfire, recipes.fallback])
def test_recipes_without_a_removed_feature_are_read(recipe):
    assert serialization._loads(stored_earlier(recipe)) == recipe


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"equalize": True}, r"^Recipe\(equalize=True\)"),
        ({"drhs": {"hadamard": True}}, r"^Gemm\(hadamard=True\)"),
        ({"drhs": {"fallback": True}}, r"^Gemm\(fallback=True\)"),
    ],
)
def test_a_removed_feature_is_named_with_what_to_use_instead(changes, named):
    stored = stored_earlier(recipes.row_block, **changes)
    with pytest.raises(ValueError, match=rf"{named}.* was removed: .*row_block_lhs"):
        serialization._loads(stored)


@dataclasses.dataclass
class EarlierQTensor:
    """A QTensor as it was: ``exponents`` are of an equalized weight."""

    main: object
    residual: object
    exponents: object
    block: tuple


# Its name has as many bytes as the name of ``QTensor``, which takes its place.
jax.tree_util.register_dataclass(
    EarlierQTensor,
    data_fields=["main", "residual", "exponents"],
    meta_fields=["block"],
)
export.register_pytree_node_serialization(
    EarlierQTensor,
    serialized_name="earlier.QTensor",
    serialize_auxdata=serialization._dumps,
    deserialize_auxdata=serialization._loads,
)


@dataclasses.dataclass
class EarlierExponents:
    rows: object


jax.tree_util.register_dataclass(EarlierExponents, data_fields=["rows"], meta_fields=[])
export.register_pytree_node_serialization(
    EarlierExponents,
    serialized_name="earlier.Exponents",
    serialize_auxdata=serialization._dumps,
    deserialize_auxdata=serialization._loads,
)


def program_of_earlier(q, exponents):
    """A serialized function of the QTensor's codes."""
    earlier = EarlierQTensor(q.main, q.residual, exponents, q.block)
    exported = export.export(jax.jit(lambda q: 2 * q.main.codes))(earlier)
    return bytearray(exported.serialize().replace(b"earlier.", b"fbq_jax."))


def test_programs_of_frozen_weights_are_read():
    pytest.importorskip("flatbuffers")
    q = quantize(jnp.ones((1, 32, 32)), block=(32, 32))
    loaded = export.deserialize(program_of_earlier(q, None))
    np.testing.assert_array_equal(loaded.call(q), 2 * q.main.codes)


def test_programs_of_equalized_weights_are_refused():
    pytest.importorskip("flatbuffers")
    q = quantize(jnp.ones((1, 32, 32)), block=(32, 32))
    program = program_of_earlier(q, EarlierExponents(jnp.ones((1, 32))))
    with pytest.raises(ValueError, match=r"^Recipe\(equalize=True\)"):
        export.deserialize(program)


def test_stored_variables_of_equalized_weights_are_refused():
    q = quantize(jnp.ones((1, 32, 32)), block=(32, 32))
    state = to_state_dict(q)
    restored = from_state_dict(q, state | {"exponents": None})
    assert isinstance(restored, QTensor)
    with pytest.raises(ValueError, match=r"^Recipe\(equalize=True\)"):
        from_state_dict(q, state | {"exponents": {"rows": jnp.ones((1, 32))}})
