"""Chooses a recipe for each layer of a model, and says why."""

from fbq_jax.choice.choosing import choose_from as choose_from
from fbq_jax.choice.products import Product as Product
from fbq_jax.choice.report import Candidate as Candidate
from fbq_jax.choice.report import ChoiceReport as ChoiceReport
from fbq_jax.choice.report import LayerReceipt as LayerReceipt
