"""Former home of `elias.OnnxModel`; to be removed in 0.3."""

from elias.pipeline import __getattr__ as __getattr__
