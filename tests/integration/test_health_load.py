"""Hostile and heavy requests, each below the server's default size limit, delay /health little.

The server runs in a process of its own. One thread asks for /health without a pause while another sends one request at
a time. All requests are sent with --thorough.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import string
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests import examples
from tests.unit.serve.served import service_of, serving, subword_model

ROOT = Path(__file__).parents[2]
STATUSES = {
    "unknown_keys": 400,  # 15.9 s before
    "long_key": 400,
    "depth": 400,
    "nested_lists": 400,
    "token_ids": 400,
    "long_stop": 200,
    "many_stops": 200,
}
SHARED_MACHINE_MS = 3000.0
"""Two free cores took 250 at most; work that is quadratic in the request takes longer than this."""
REQUEST_BYTES = 1 << 20
CONTEXT, TIMEOUT_S = 4096, 60.0
START_S, ANSWER_S = 120.0, 180.0
NAME = "tiny/bytes"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def _filled(head: str, items: Callable[[int], str], tail: str, separator: str = ",") -> str:
    """Return head, as many items as the size limit allows, and tail."""
    parts, n_bytes = list[str](), len(head) + len(tail)
    while True:
        item = items(len(parts))
        n_bytes += len(item) + len(separator)
        if n_bytes >= REQUEST_BYTES:
            return head + separator.join(parts) + tail
        parts.append(item)


def cases(seed: int) -> dict[str, tuple[str, str]]:
    """Return name -> path and body of every request."""
    rng = random.Random(seed)

    def word(n: int) -> str:
        return "".join(rng.choices(string.ascii_lowercase, k=n))

    salt = word(3)
    model = f'"model":"{NAME}",'
    prompt, chat = f'{{{model}"prompt":"a","max_tokens":64,', f'{{{model}"max_tokens":64,"messages":['
    ids = f'{{{model}"max_tokens":8,"prompt":'
    user = '{"role":"user","content":"a"}'
    part = '{"role":"user","content":'
    n_room = REQUEST_BYTES - 200
    words = word(8) * (n_room // 8)
    stop = "a" * (n_room - 1) + "b"
    stops = json.dumps(["a" * (n_room // 16 - 10) + string.ascii_lowercase[i] for i in range(16)])
    sampling = f'"max_tokens":{CONTEXT - 64},"temperature":0,"logprobs":true,"top_logprobs":20'
    completions = {
        "unknown_keys": _filled(prompt, lambda i: f'"{salt}{i}":1', "}"),
        "unknown_keys_near": _filled(prompt, lambda i: f'"max_tokens{i}":1', "}"),
        "long_key": prompt + f'"{words}":1}}',
        "long_model": f'{{"prompt":"a","model":"{words}"}}',
        "long_number": prompt + f'"seed":1{"0" * n_room}}}',
        "long_fraction": prompt + f'"top_p":0.{"1" * n_room}}}',
        "lists": _filled(ids + "[", lambda _: "[]", "]}"),
        "nested_lists": _filled(ids + "[", lambda _: "[[[[[1]]]]]", "]}"),
        "depth": f"{ids}{'[' * n_room}}}",
        "token_ids": _filled(ids + "[", lambda _: "1", "]}"),
        "fraction_ids": _filled(ids + "[", lambda _: "1.0", "]}"),
        "long_prompt": _filled(ids + '"', lambda _: "the quick brown fox", '"}', " "),
        "long_prompt_one_word": _filled(ids + '"', lambda _: "abcabd", '"}', ""),
        "long_stop": prompt + f'"stop":"{stop}"}}',
        "many_stops": prompt + f'"stop":{stops}}}',
        "wrong_stops": _filled(prompt + '"stop":[', lambda _: "1", "]}"),
        "bias": _filled(prompt + '"logit_bias":{', lambda i: f'"{i}":1', "}}"),
    }
    chats = {
        "unknown_keys_of_message": _filled(chat + part + '"a",', lambda i: f'"{salt}{i}":1', "}]}"),
        "long_role": chat + f'{{"role":"{"x" * n_room}","content":"a"}}]}}',
        "empty_messages": _filled(chat, lambda _: "{}", "]}"),
        "wrong_messages": _filled(chat, lambda _: "1", "]}"),
        "valid_messages": _filled(chat, lambda _: user, "]}"),
        "empty_parts": _filled(chat + part + "[", lambda _: "{}", "]}]}"),
        "long_chat": chat + part + f'"{"ab" * (n_room // 2)}"}}]}}',
        "tools": _filled(chat + user + '],"tools":[', lambda _: "{}", "]}"),
        "answer_with_logprobs": f'{{{model}{sampling},"messages":[{user}]}}',
    }
    return {name: (COMPLETIONS, body) for name, body in completions.items()} | {
        name: (CHAT, body) for name, body in chats.items()
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


def ask(port: int, path: str, body: bytes) -> int:
    """Send one request and read its answer; return the status."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def serve() -> None:
    """Serve a tiny model on a free port, printed as one line, until standard input ends."""
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


@contextlib.contextmanager
def server() -> Iterator[int]:
    """Serve in another process; yield the port."""
    command = [sys.executable, "-m", "tests.integration.test_health_load"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()
            try:
                process.wait(START_S)
            except subprocess.TimeoutExpired:
                process.kill()


def test_hostile_requests_delay_health_little() -> None:
    statuses: dict[str, int] = {}
    delays: dict[str, float] = {}
    with server() as port:
        prober = Prober(port)
        try:
            time.sleep(0.5)
            prober.longest_ms()
            for name, (path, text) in cases(seed=1).items():
                if name not in STATUSES and not examples.is_thorough:
                    continue
                body = text.encode()
                assert len(body) <= REQUEST_BYTES, name
                statuses[name] = ask(port, path, body)
                time.sleep(0.3)  # until the probe that this request delayed has its answer
                delays[name] = prober.longest_ms()
        finally:
            prober.close()
    assert {name: statuses[name] for name in STATUSES} == STATUSES
    assert max(delays.values()) < SHARED_MACHINE_MS, delays


if __name__ == "__main__":
    serve()
