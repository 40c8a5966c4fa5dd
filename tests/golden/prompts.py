"""The sixteen prompts of the golden runs: short, long, chat, code, Chinese, emoji, odd spaces."""

from __future__ import annotations

STORY = (
    "The mill stood where the river bent twice. In spring the water came down brown and loud, and the miller opened "
    "the upper gate a hand's width, no more, because his father had opened it two and lost the wheel. Below the mill "
    "lay a pond with carp in it, and beyond the pond a road on which carts went to market. "
)

CODE = '''import heapq

def dijkstra(graph, source):
    """Shortest distances from source; graph maps a node to (neighbour, weight) pairs."""
    distance = {source: 0}
    queue = [(0, source)]
    while queue:
        d, node = heapq.heappop(queue)
        if d > distance[node]:
            continue
        for neighbour, weight in graph[node]:
'''

TEXTS: dict[str, str] = {
    "one word": "Water",
    "short": "The capital of France is",
    "list": "Three things to pack for a week in the mountains:\n1.",
    "english": STORY + "One evening a stranger",
    "long": "".join(f"Chapter {i}. {STORY}" for i in range(1, 17)) + "\n\nIn the last chapter,",
    "python": CODE,
    "c": "#include <stdio.h>\n\nint main(void) {\n\tfor (int i = 0; i < 10; i++) {\n\t\tprintf(",
    "sql": "SELECT customer.name, SUM(orders.total)\nFROM customer\nJOIN orders ON",
    "json": '{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"], "works": [',
    "chinese": "春天来了，河水涨了起来。老磨坊主说：",
    "emoji": "Weather report: ☀️🌦️⛈️ — and for the family 👩‍👩‍👧:",
    "mixed": "Übergrößenträger means « très grand » in 中文:",
}

CHATS: dict[str, list[dict[str, str]]] = {
    "chat": [{"role": "user", "content": "What makes bread rise? Answer in two sentences."}],
    "chat system": [
        {"role": "system", "content": "You are a terse assistant that answers in French."},
        {"role": "user", "content": "How many legs has a spider?"},
    ],
    "chat turns": [
        {"role": "user", "content": "Name a prime number above 10."},
        {"role": "assistant", "content": "11"},
        {"role": "user", "content": "And the next one after it?"},
    ],
    "chat code": [{"role": "user", "content": "Write a Python function that reverses the words of a sentence."}],
}
