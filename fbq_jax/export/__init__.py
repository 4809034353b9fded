"""Checkpoints that serving engines load, with the INT8 codes of a frozen model.

`frozen_weights` reads the codes out of the variables that ``freeze`` returns, and each
of `FORMATS` turns them into the tensors and the configuration of one format.  The names
of tensors and the remaining parameters are the model's.
"""

from fbq_jax.export.formats import FORMATS as FORMATS
from fbq_jax.export.weights import BlockWeight as BlockWeight
from fbq_jax.export.weights import ExportError as ExportError
from fbq_jax.export.weights import frozen_weights as frozen_weights
