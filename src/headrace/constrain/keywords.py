"""The words of JSON Schema: which are honoured, which only describe, which are refused and what to write instead. Data.

docs/techniques/constrained-output.md lists them all, and a test holds the two together.
"""

from __future__ import annotations

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")

HONOURED = (
    *("type", "enum", "const", "$ref", "$defs", "definitions", "anyOf", "oneOf", "allOf"),
    *("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    *("prefixItems", "items", "additionalItems", "minItems", "maxItems"),
    *("minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
"""Every answer keeps them, or the request is refused."""

ANNOTATIONS = (
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "id", "$comment", "$anchor", "$vocabulary"),
    *("contentMediaType", "contentEncoding", "contentSchema", "discriminator", "xml", "externalDocs", "strict"),
)
"""They say nothing of what is right, and are left out; so is every word that begins with "x-", but x-guidance."""

REFUSED = {
    "not": "list what is allowed instead, with enum or anyOf",
    "if": "write the cases out, with anyOf",
    "then": "write the cases out, with anyOf",
    "else": "write the cases out, with anyOf",
    "contains": "say with items or prefixItems what the items are",
    "minContains": "say with items or prefixItems what the items are",
    "maxContains": "say with items or prefixItems what the items are",
    "uniqueItems": "only false is honoured: whether an item was there before cannot be known",
    "propertyNames": "use patternProperties with additionalProperties false",
    "dependencies": "write the cases out, with anyOf",
    "dependentRequired": "write the cases out, with anyOf",
    "dependentSchemas": "write the cases out, with anyOf",
    "unevaluatedProperties": "use additionalProperties where the properties are",
    "unevaluatedItems": "use items beside prefixItems",
    "$dynamicRef": "use $ref",
    "$dynamicAnchor": "use $ref with a path",
    "$recursiveRef": "use $ref",
    "$recursiveAnchor": "use $ref with a path",
    "nullable": 'put "null" into type',
    "x-guidance": "how JSON is written is not for a request to say",
}
"""Each with what would be right. Values that say nothing are let through: `NEUTRAL`."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "nullable": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
}
"""What a refused word may be set to."""

_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP}-02-29)"
)
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_CLOCK})"
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,40}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,3}}\.[a-zA-Z]{{2,20}}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [
        f"({_HEX}:){{7}}{_HEX}",
        *(
            f"({_HEX}:){{0,{n - 1}}}{_HEX}::({_HEX}:){{0,{5 - n}}}{_HEX}" if n else f"::({_HEX}:){{0,5}}{_HEX}"
            for n in range(6)
        ),
        f"({_HEX}:){{0,5}}{_HEX}::",
        "::",
    ]
)
_SPAN = "([0-9]{1,4}H([0-9]{1,4}M([0-9]{1,4}S)?)?|[0-9]{1,4}M([0-9]{1,4}S)?|[0-9]{1,4}S)"
_DAYS = "([0-9]{1,4}Y([0-9]{1,4}M([0-9]{1,4}D)?)?|[0-9]{1,4}M([0-9]{1,4}D)?|[0-9]{1,4}D)"
_IN_URI = r"([a-zA-Z0-9._~!$&'()*+,;=:@-]|%[0-9a-fA-F]{2})"

FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": f"^P({_DAYS}(T{_SPAN})?|T{_SPAN}|[0-9]{{1,4}}W)$",
    "email": rf"^[a-zA-Z0-9_%+-]{{1,32}}(\.[a-zA-Z0-9_%+-]{{1,31}})?@{_HOST}$",
    "hostname": f"^{_HOST}$",
    "ipv4": rf"^({_BYTE}\.){{3}}{_BYTE}$",
    "ipv6": f"^({_IPV6})$",
    "uuid": "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "uri": rf"^[a-zA-Z][a-zA-Z0-9+.-]{{0,15}}://{_HOST}(:[0-9]{{1,4}})?(/{_IN_URI}*)*(\?{_IN_URI}*)?(#{_IN_URI}*)?$",
}
"""Formats of strings. Each allows what is right and usual, and no more: not every address that a standard has."""

RANGES = {
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
}
"""Formats of integers, and what lies in them."""

FREE_FORMATS = ("float", "double", "decimal", "password")
"""Formats that allow every value of their type."""
