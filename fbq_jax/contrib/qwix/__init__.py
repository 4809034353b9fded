"""Whole models whose own code multiplies by their parameters, through Qwix.

``fbq_jax.quantize`` reaches layers that take an op.  Other layers call ``jnp.einsum``,
``@`` or ``lax.dot_general`` on their parameters.  Qwix replaces functions of JAX while
a model runs, and asks a *provider* what to do instead.

The functions that Qwix's own providers replace do not suffice for ops with state.  JAX
traces ``@`` and ``jnp.dot`` once for all layers with equal shapes, so that only the
first layer calls the replaced ``lax.dot_general``, and inside a trace that no state may
leave.  The provider in ``products`` replaces the function below, by which JAX calls a
primitive.  It sees the operands of every product, and follows parameters through casts
and reshapes.  The one in ``providers`` shows the products of layers with an op to
Qwix's LoRA.  ``qwix.quantize_model`` would make a class for each call, which JAX never
forgets.
"""

from fbq_jax.contrib import needs

with needs("qwix", extra="qwix"):
    from fbq_jax.contrib.qwix.linen_models import quantize as quantize
    from fbq_jax.contrib.qwix.nnx_models import quantize_nnx as quantize_nnx
    from fbq_jax.contrib.qwix.qarrays import from_qarray as from_qarray
    from fbq_jax.contrib.qwix.qarrays import to_qarray as to_qarray
