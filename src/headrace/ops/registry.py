"""Every kind of operation with its reference. Importing this imports PyTorch: only who computes with it does so."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.ops.attention import ATTEND, STORE
from headrace.ops.linear import LINEAR
from headrace.ops.norm import RMS_NORM
from headrace.ops.op import Op
from headrace.ops.pointwise import ADD, GATED, SOFTCAP
from headrace.ops.rotary import ANGLES, ROTATE
from headrace.ops.tokens import EMBED, SELECT

OPS: Mapping[str, Op] = {
    op.signature.kind: op
    for op in (EMBED, SELECT, LINEAR, RMS_NORM, ANGLES, ROTATE, STORE, ATTEND, GATED, ADD, SOFTCAP)
}
