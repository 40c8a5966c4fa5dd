"""How numbers are stored: one file per format or tight family, and `FORMATS`, which finds a format by its name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from headrace.formats.format import Format
from headrace.formats.iq4 import IQ4_NL, IQ4_XS
from headrace.formats.plain import BF16, F16, F32
from headrace.formats.q2_k import Q2_K
from headrace.formats.q3_k import Q3_K
from headrace.formats.q4_0 import Q4_0, Q4_1
from headrace.formats.q4_k import Q4_K, Q5_K
from headrace.formats.q5_0 import Q5_0, Q5_1
from headrace.formats.q6_k import Q6_K
from headrace.formats.q8_0 import Q8_0

_ALL: tuple[type[Format], ...] = (
    *(F32, F16, BF16),
    *(Q4_0, Q4_1, Q5_0, Q5_1, Q8_0),
    *(Q2_K, Q3_K, Q4_K, Q5_K, Q6_K),
    *(IQ4_NL, IQ4_XS),
)

FORMATS: Mapping[str, type[Format]] = MappingProxyType({kind.name: kind for kind in _ALL})
"""Every format by its name."""

__all__ = ["FORMATS", "Format", *sorted(kind.name for kind in _ALL)]
