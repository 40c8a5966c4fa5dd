"""The texts on which tokenizers are compared: each is nasty in its own way. Pure ASCII source where it matters."""

from __future__ import annotations

import hashlib

CODE = '''def f(x: int) -> dict[str, "T"]:
    """Doc\\twith tab."""
    if x >= 0x1F and not (x % 2):
\t\treturn {"a": [1, 2.5e-3, None], 'b': f"{x!r:>10}"}  # TODO: x != y
    return {**kw, "re": r"\\d+\\s*(?:\\w|[^\\n])"}
'''

TEXTS: tuple[str, ...] = (
    "",
    " ",
    "a",
    "Hello, world! It's we'll THEY'RE don'T I'm you've he'd",
    "The quick brown fox jumps over the lazy dog. 3.14159, 1,000,000; 100% (of $5)?",
    CODE,
    '#include <stdio.h>\nint main(void){for(int i=0;i<10;++i)printf("%d\\n",i);return 0;}\n',
    "SELECT a.b, COUNT(*) FROM t AS a WHERE x <> 'it''s' -- comment\r\nGROUP BY 1;",
    "<html><body><p>a &amp; b</p><br/><b>c</b><!-- d --></body></html>",
    "https://example.org/a_b?c=d&e=%20f#g user@example.com C:\\Users\\x\\y.txt /usr/lib/x.so.1",
    "camelCaseWords snake_case_words SCREAMING_CASE kebab-case v1.2.3-rc.4+build",
    "春天来了，河水涨了起来。老磨坊主说：“快把闸门打开！”第１２３号",
    "東京タワーは高さ333mです。ｶﾞｯﾂ、ガッツ、カ\u3099ッツ",
    "안녕하세요 세계! 각\u1100\u1161\u11a8 한국어",
    "مرحبا بالعالم ١٢٣ שלום עולם नमस्ते दुनिया १२३ สวัสดีชาวโลก ๑๒๓",
    "Привет, мир! Ελληνικά άλφα Übergrößenträger naïve façade Œuvre ǅ İstanbul ßẞ",
    "\U0001f600\U0001f3fd \U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308",
    "\u2615\ufe0f 1\ufe0f\u20e3 \U0001f1e9\U0001f1ea",
    "e\u0301 \u00e9 a\u0308\u0323 \u1e69 s\u0323\u0307 Z\u0351\u036b\u0343a\u0335l\u0321g\u0300o\u0322",
    "\u212b \u2126 \ufb01 \u00bd \u00b2 \u2163 \u2460 \uff21 \u0958 \u1100\u1161",
    "a\u00a0b\u3000c\u2028d\u2029e\u2003f\u200bg\u202fh\u205fi\u1680j\u180ek\ufeffl\u0085m",
    "a\tb\t\tc\t\t\td\r\ne\r\n\r\nf\rg\n\n\nh\n \n  \ni\x0b\x0cj",
    " leading",
    "  two leading",
    "trailing ",
    "trailing   ",
    "\nleading line",
    "   \n  mixed \t \n\t x",
    "a  b   c    d     e      f       g        h         i" + " " * 20 + "j" + " " * 40 + "k" + " " * 200 + "l",
    " " * 1000,
    "\n" * 300 + "x",
    "\t" * 70 + "x" + "\r\n" * 40,
    "\u3000" * 17 + "\u00a0" * 9,
    "0123456789" * 40,
    "x0 1 22 333 4444 55555 1e10 0x1F 1_000 1.000.000,00 -5 +7 \u00bc\u2153",
    "items:\n\n1. one\n\n\n22. two\n   3. three\t4\u00a05",
    "a  1   22 \n 3\n\n4",
    "!!! ??? ... --- === *** /// \\\\\\ ~~~ @@@ ### $$$ %%% ^^^ &&& ((( ))) [[[ ]]] {{{ }}}",
    "<<< >>> ||| ;;; ''' \"\"\" ```",
    "don''t 'quoted' ''s 'S 'LL \u2019s \u2019ll",
    "".join(map(chr, range(32))) + "\x7f" + "".join(map(chr, range(0x80, 0xA0))),
    "a\x00b\x00\x00c",
    "".join(map(chr, range(0xA0, 0x180))),
    "\ufffd \ufffc \ufdd0 \ufdef \uffff \ue000 \uf8ff \U000f0000 \U0010ffff \U0001fffe",
    "\u202aabc\u202c \u2066x\u2069 \u200e\u200f \u2060\u00ad",
    "\U00013000\U00012000 \U00010330 \U0001d400\U0001d7d8 \U00020000\U0002f800",
    "\u2581 \u2581\u2581x \u2581a \u0120x \u010a \u0100",
    "<|endoftext|><|im_start|>system\nYou<|im_end|>\n<|im_start|>user",
    "<bos><eos><pad><unk><mask><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
    "<s>[INST] <<SYS>>x<</SYS>> [/INST]</s> <|begin_of_text|><|eot_id|><|user|><|end|>",
    "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|><repo_name>x<file_sep>y<filename>z<gh_stars>0-10",
    '<tool_call>{"name": "f", "arguments": {}}</tool_call><think>\n\n</think> [multimodal]<unused0><unused6241>',
    "< |im_end|> <|im_end |> <|im_end|<|im_end|>> <<|im_end|>> <|IM_END|> <|im_|im_end|>end|>",
    "<|im_start|> <|im_end|>\n  <|im_end|>x<|endoftext|> ",
    "<0x41><0x0A> <0xE2><0x82><0xAC> &lt;0x41&gt;",
    "<table><tr><td>1</td></tr></table><h1>x</h1><strong>y</strong><i>z</i>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "abababababababababab hahahahahahaha ......................... ----------------------------------",
    "Pneumonoultramicroscopicsilicovolcanoconiosis Donaudampfschifffahrtsgesellschaftskapit\u00e4n",
    "\\n \\t \\u0041 \\x41 %0A &#10; \\\\",
    "I\u2764\ufe0f\U0001f1fa\U0001f1f8 5\u00d73\u00f72\u22601 \u2211\u222b\u221a\u221e",
    "\u2190\u2192 \u2588\u2591 \u250c\u2500\u2510",
)


def large() -> str:
    """100,000 characters of everything above, in an order that looks random and is always the same."""
    pieces = []
    size = i = 0
    while size < 100_000:
        pick = int.from_bytes(hashlib.sha256(str(i).encode()).digest()[:4], "big")
        text = TEXTS[pick % len(TEXTS)]
        pieces.append(text)
        size += len(text)
        i += 1
    return "".join(pieces)[:100_000]
