"""Tests that types are examined by one thread at a time: msgspec crashes if two threads first use a struct at once."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from seamark.formats.runtime.decoding import convert_json, convert_msgpack, convert_values

ROUNDS = 200
"""Without the lock the process crashed in the first rounds of each of five runs."""
FIRST_USE = f"""
from __future__ import annotations  # as in our modules: msgspec evaluates the annotations, in Python
import sys, types
from threading import Barrier, Thread
from seamark.formats.runtime.decoding import convert_json, convert_msgpack, convert_values

sys.setswitchinterval(1e-6)
SOURCE = '''
from __future__ import annotations
import msgspec
class Inner(msgspec.Struct):
    a: int
    b: str
    c: list[int]
class Outer(msgspec.Struct, rename="kebab"):
    blobs: list[Inner]
    properties: dict[str, str]
    x_y: int | None = None
'''
VALUE = {{"blobs": [{{"a": 1, "b": "x", "c": [1]}}], "properties": {{"k": "v"}}, "x-y": 3}}
import msgspec
USES = [
    (convert_json, msgspec.json.encode(VALUE)), (convert_msgpack, msgspec.msgpack.encode(VALUE)),
    (convert_values, VALUE),
] * 2
for number in range({ROUNDS}):
    module = types.ModuleType(f"round{{number}}")
    sys.modules[module.__name__] = module
    exec(SOURCE, module.__dict__)
    start, decoded_values = Barrier(len(USES)), []
    def use(decode, document):
        start.wait()
        decoded_values.append(msgspec.to_builtins(decode(document, module.Outer)))
    threads = [Thread(target=use, args=decode_and_document) for decode_and_document in USES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert decoded_values == [VALUE] * len(USES), decoded_values
print("done")
"""


def test_threads_that_first_use_a_struct_at_once_all_decode_it() -> None:
    result = subprocess.run([sys.executable, "-c", FIRST_USE], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stderr


class Point(msgspec.Struct):
    x: int
    y: int = 0


def test_values_have_the_requested_type_or_the_error_names_the_field() -> None:
    assert convert_json(b'{"x": 1}', Point) == convert_values({"x": 1}, Point) == Point(1)
    assert convert_msgpack(msgspec.msgpack.encode({"x": 1, "y": 2}), Point) == Point(1, 2)
    assert convert_json('[{"x": 1}]', list[Point]) == [Point(1)]
    assert convert_values({1: "a"}, dict[int, str]) == {1: "a"}
    for decode, document in ((convert_json, b'{"x": "1"}'), (convert_values, {"x": "1"})):
        with pytest.raises(msgspec.ValidationError, match=r"\$\.x"):
            decode(document, Point)  # type: ignore[operator]
