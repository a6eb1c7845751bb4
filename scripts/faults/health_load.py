"""Send hostile and heavy requests to a server and measure how long each of them delays /health.

Every request is below the server's default size limit. The server runs in a process of its own, with a tiny model and
a tokenizer of subwords. One thread asks for /health without a pause while another sends one request at a time.

Usage: python scripts/faults/health_load.py [--seed 0] [--rounds 1] [--only CASE,...] [--json FILE]

It prints one JSON object and ends with status 1 when a request delayed /health by more than the bound.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import string
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BOUND_MS = 250.0
REQUEST_BYTES = 1 << 20
CONTEXT, TIMEOUT_S = 4096, 60.0
START_S, ANSWER_S = 120.0, 180.0
NAME = "tiny/bytes"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Case = tuple[str, bytes]


def _filled(head: str, items: Callable[[int], str], tail: str, separator: str = ",") -> bytes:
    """Return head, as many items as the size limit allows, and tail."""
    parts, n_bytes = list[str](), len(head) + len(tail)
    while True:
        item = items(len(parts))
        n_bytes += len(item) + len(separator)
        if n_bytes >= REQUEST_BYTES:
            return (head + separator.join(parts) + tail).encode()
        parts.append(item)


def cases(seed: int) -> dict[str, Case]:
    """Return name -> path and body of every request."""
    rng = random.Random(seed)

    def word(n: int) -> str:
        return "".join(rng.choices(string.ascii_lowercase, k=n))

    salt = word(3)
    model = f'"model":"{NAME}",'
    prompt, chat = f'{{{model}"prompt":"a","max_tokens":64,', f'{{{model}"max_tokens":64,"messages":['
    ids = f'{{{model}"max_tokens":8,"prompt":'
    user = '{"role":"user","content":"a"}'
    n_room = REQUEST_BYTES - 200
    stop = "a" * (n_room - 1) + "b"
    many_stops = json.dumps(["a" * (n_room // 16 - 10) + string.ascii_lowercase[i] for i in range(16)])
    return {
        "unknown_keys": (COMPLETIONS, _filled(prompt, lambda i: f'"{salt}{i}":1', "}")),
        "unknown_keys_near": (COMPLETIONS, _filled(prompt, lambda i: f'"max_tokens{i}":1', "}")),
        "unknown_keys_of_message": (
            CHAT,
            _filled(chat + '{"role":"user","content":"a",', lambda i: f'"{salt}{i}":1', "}]}"),
        ),
        "long_key": (COMPLETIONS, (prompt + f'"{word(8) * (n_room // 8)}":1}}').encode()),
        "long_model": (COMPLETIONS, (f'{{"prompt":"a","model":"{word(8) * (n_room // 8)}"}}').encode()),
        "long_role": (CHAT, (chat + f'{{"role":"{"x" * n_room}","content":"a"}}]}}').encode()),
        "long_number": (COMPLETIONS, (prompt + f'"seed":1{"0" * n_room}}}').encode()),
        "long_fraction": (COMPLETIONS, (prompt + f'"top_p":0.{"1" * n_room}}}').encode()),
        "empty_messages": (CHAT, _filled(chat, lambda _: "{}", "]}")),
        "wrong_messages": (CHAT, _filled(chat, lambda _: "1", "]}")),
        "valid_messages": (CHAT, _filled(chat, lambda _: user, "]}")),
        "empty_parts": (
            CHAT,
            _filled(chat + '{"role":"user","content":[', lambda _: "{}", "]}]}"),
        ),
        "lists": (COMPLETIONS, _filled(ids + "[", lambda _: "[]", "]}")),
        "nested_lists": (COMPLETIONS, _filled(ids + "[", lambda _: "[[[[[1]]]]]", "]}")),
        "depth": (COMPLETIONS, f"{ids}{'[' * n_room}}}".encode()),
        "token_ids": (COMPLETIONS, _filled(ids + "[", lambda _: "1", "]}")),
        "fraction_ids": (COMPLETIONS, _filled(ids + "[", lambda _: "1.0", "]}")),
        "long_prompt": (COMPLETIONS, _filled(ids + '"', lambda _: "the quick brown fox", '"}', " ")),
        "long_prompt_one_word": (COMPLETIONS, _filled(ids + '"', lambda _: "abcabd", '"}', "")),
        "long_chat": (CHAT, (chat + f'{{"role":"user","content":"{"ab" * (n_room // 2)}"}}]}}').encode()),
        "long_stop": (COMPLETIONS, (prompt + f'"stop":"{stop}"}}').encode()),
        "many_stops": (COMPLETIONS, (prompt + f'"stop":{many_stops}}}').encode()),
        "wrong_stops": (COMPLETIONS, _filled(prompt + '"stop":[', lambda _: "1", "]}")),
        "bias": (COMPLETIONS, _filled(prompt + '"logit_bias":{', lambda i: f'"{i}":1', "}}")),
        "tools": (CHAT, _filled(chat + user + '],"tools":[', lambda _: "{}", "]}")),
        "answer_with_logprobs": (
            CHAT,
            (
                f'{{{model}"max_tokens":{CONTEXT - 64},"temperature":0,"logprobs":true,"top_logprobs":20,'
                f'"messages":[{user}]}}'
            ).encode(),
        ),
    }


class Prober:
    """Ask for /health again and again, and keep the longest time that an answer took."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
        self._longest = 0.0
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over:
            began = time.perf_counter()
            self._connection.request("GET", "/health")
            self._connection.getresponse().read()
            self._longest = max(self._longest, time.perf_counter() - began)
            time.sleep(0.002)

    def longest_ms(self) -> float:
        """Return the longest time since the last call, in milliseconds."""
        longest, self._longest = self._longest, 0.0
        return 1e3 * longest

    def close(self) -> None:
        """Stop asking."""
        self._is_over = True
        self._thread.join()
        self._connection.close()


def ask(port: int, path: str, body: bytes) -> tuple[int, int]:
    """Send one request; return the status of its answer and the bytes of its body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, len(answer.read())
    finally:
        connection.close()


def measure(port: int, seed: int, rounds: int, only: tuple[str, ...] = ()) -> dict[str, Any]:
    """Send every case, and return what each of them did."""
    prober = Prober(port)
    measured: dict[str, Any] = {}
    try:
        time.sleep(0.5)
        idle = prober.longest_ms()
        for index in range(rounds):
            for name, (path, body) in cases(seed + index).items():
                if only and name not in only:
                    continue
                assert len(body) <= REQUEST_BYTES, name
                began = time.perf_counter()
                status, answered = ask(port, path, body)
                seconds = time.perf_counter() - began
                time.sleep(0.3)  # until the probe that this request delayed has its answer
                longest = max(prober.longest_ms(), measured.get(name, {}).get("health_ms", 0.0))
                measured[name] = {
                    "health_ms": round(longest, 1),
                    "seconds": round(seconds, 3),
                    "status": status,
                    "request_bytes": len(body),
                    "answer_bytes": answered,
                }
    finally:
        prober.close()
    worst = max(measured, key=lambda name: measured[name]["health_ms"])
    return {
        "seed": seed,
        "bound_ms": BOUND_MS,
        "idle_ms": round(idle, 1),
        "worst": {"case": worst, "health_ms": measured[worst]["health_ms"]},
        "cases": measured,
    }


def serve() -> None:
    """Serve a tiny model on a free port, printed as one line, until standard input ends."""
    sys.path.insert(0, str(ROOT))
    from tests.unit.serve.served import service_of, serving, subword_model

    model, tokenizer = subword_model()
    service = service_of(
        model,
        tokenizer=tokenizer,
        max_len=CONTEXT,
        max_tokens=CONTEXT - 1,
        timeout_s=TIMEOUT_S,
        request_bytes=REQUEST_BYTES,
    )
    with serving(service) as address:
        print(address.rpartition(":")[2], flush=True)
        sys.stdin.read()


def main(argv: list[str] | None = None) -> int:
    """Run the command and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", help="names of cases, separated by commas")
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.serve:
        serve()
        return 0
    command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port = int(process.stdout.readline())
        only = tuple(name for name in options.only.split(",") if name)
        try:
            result = measure(port, options.seed, options.rounds, only)
        finally:
            process.stdin.close()
            try:
                process.wait(START_S)
            except subprocess.TimeoutExpired:
                process.kill()
    text = json.dumps(result, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    return int(result["worst"]["health_ms"] > BOUND_MS)


if __name__ == "__main__":
    sys.exit(main())
