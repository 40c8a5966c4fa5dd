"""Every kind of operation there is, by its signature: all that a program and its checking need to know of them.

What each computes is said by its reference, in the module of its group; importing this does not import PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Signature:
    """What an operation of one kind takes and gives."""

    kind: str
    inputs: tuple[str, ...]
    """Names of its input buffers, in order."""
    weights: tuple[str, ...] = ()
    """Names of its weights, in order."""
    optional: int = 0
    """How many of the last weights may be left out."""
    attrs: Mapping[str, tuple[type, ...]] = field(default_factory=dict)
    """Names of its attributes and the types they may have."""
    output: bool = True
    """Whether it writes a buffer."""
    kv: bool = False
    """Whether it reads or writes the KV pool; its reference then takes `index` (a `KVIndex`) and `pool` by keyword."""


EMBED = Signature("embed", ("tokens",), weights=("table",), attrs={"scale": (float,)})
SELECT = Signature("select", ("x", "wanted"))
LINEAR = Signature("linear", ("x",), weights=("weight", "bias"), optional=1)
RMS_NORM = Signature("rms_norm", ("x",), weights=("weight",), attrs={"eps": (float,), "offset": (float,)})
ANGLES = Signature("angles", ("positions",), weights=("frequencies",), attrs={"factor": (float,)})
ROTATE = Signature("rotate", ("x", "turns"), attrs={"dim": (int,)})
STORE = Signature("store", ("keys", "values"), output=False, kv=True)
ATTEND = Signature("attend", ("queries",), attrs={"scale": (float,), "softcap": (float, type(None))}, kv=True)
GATED = Signature("gated", ("gate", "up"), attrs={"activation": (str,)})
ADD = Signature("add", ("x", "y"))
SOFTCAP = Signature("softcap", ("x",), attrs={"cap": (float,)})

SIGNATURES: Mapping[str, Signature] = {
    s.kind: s for s in (EMBED, SELECT, LINEAR, RMS_NORM, ANGLES, ROTATE, STORE, ATTEND, GATED, ADD, SOFTCAP)
}
