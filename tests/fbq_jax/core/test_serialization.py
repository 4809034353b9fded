"""Programs and variables that an earlier version stored."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.serialization import from_state_dict, to_state_dict
from jax import export

from fbq_jax import Quantized, recipes
from fbq_jax.core import serialization
from fbq_jax.kernels.quantized import Term


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


STORED = Quantized(
    Term(jnp.ones((1, 32, 32), jnp.int8), jnp.ones((1, 1, 1))), None, (32, 32)
)


def registered(data, meta, name):
    """A class whose serialized name has as many bytes as that of today's class."""
    kind = dataclasses.make_dataclass(name, data + meta)
    jax.tree_util.register_dataclass(kind, data_fields=data, meta_fields=meta)
    export.register_pytree_node_serialization(
        kind,
        serialized_name=f"earlier.{name}",
        serialize_auxdata=serialization._dumps,
        deserialize_auxdata=serialization._loads,
    )
    return kind


# ``Quantized`` as it was: ``exponents`` are of an equalized weight.
EarlierQTensor = registered(["main", "residual", "exponents"], ["block"], "QTensor")
EarlierExponents = registered(["rows"], [], "Exponents")


def program_of_earlier(q, exponents):
    """A serialized function of an operand's codes."""
    earlier = EarlierQTensor(q.main, q.residual, exponents, q.block)
    exported = export.export(jax.jit(lambda q: 2 * q.main.codes))(earlier)
    return bytearray(exported.serialize().replace(b"earlier.", b"fbq_jax."))


def test_programs_of_frozen_weights_are_read():
    pytest.importorskip("flatbuffers")
    loaded = export.deserialize(program_of_earlier(STORED, None))
    np.testing.assert_array_equal(loaded.call(STORED), 2 * STORED.codes)


def test_programs_of_equalized_weights_are_refused():
    pytest.importorskip("flatbuffers")
    program = program_of_earlier(STORED, EarlierExponents(jnp.ones((1, 32))))
    with pytest.raises(ValueError, match=r"^Recipe\(equalize=True\)"):
        export.deserialize(program)


def test_stored_variables_of_equalized_weights_are_refused():
    state = to_state_dict(STORED)
    restored = from_state_dict(STORED, state | {"exponents": None})
    assert isinstance(restored, Quantized)
    with pytest.raises(ValueError, match=r"^Recipe\(equalize=True\)"):
        from_state_dict(STORED, state | {"exponents": {"rows": jnp.ones((1, 32))}})
