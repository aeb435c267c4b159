"""All tiny models, by the golden file that holds their logits."""

from __future__ import annotations

from typing import Any

from tiny_hybrids import HYBRID_CASES
from tiny_mixtures import MIXTURE_CASES
from tiny_models import CASES
from tiny_variants import VARIANT_CASES

GOLDEN_FILES: dict[str, dict[str, dict[str, Any]]] = {
    "tiny_logits": CASES,
    "hybrid_logits": HYBRID_CASES,
    "mixture_logits": MIXTURE_CASES,
    "variant_logits": VARIANT_CASES,
}
ALL_CASES = {case: config for cases in GOLDEN_FILES.values() for case, config in cases.items()}
