"""Accesses values and classes of Scala through py4j. A call to the JVM takes 0.1 ms."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any, cast

from pyspark.sql import SparkSession

SPARK = "org.apache.spark.sql."
OPTIMIZER = f"{SPARK}catalyst.optimizer."


def to_list(sequence: Any) -> list[Any]:
    """Return the items of a Scala Seq."""
    return [sequence.apply(index) for index in range(sequence.size())]


def to_strings(sequence: Any) -> list[str]:
    """Return the items of a Scala Seq as strings.

    At most two calls to the JVM are needed, unless an item contains a zero byte.
    """
    count = sequence.size()
    texts = str(sequence.mkString("\0")).split("\0") if count else []
    # An item that contains a zero byte splits into too many parts, so the items are then read one by one.
    return texts if len(texts) == count else [str(element) for element in to_list(sequence)]


class JvmStatics:
    """Classes, objects and static members of the JVM.

    To find a member takes several calls to the JVM. Members are cached, because they are the same for all statements.
    """

    def __init__(self, jvm: Any) -> None:
        self._jvm = jvm
        self._classes: dict[str, Any] = {}
        self._objects: dict[str, Any] = {}

    def find_class(self, name: str) -> Any:
        if name not in self._classes:
            self._classes[name] = getattr(self._jvm, name)
        return self._classes[name]

    def find_object(self, name: str) -> Any:
        """Return the only instance of a Scala object."""
        if name not in self._objects:
            self._objects[name] = self.find_class(f"{name}$").__getattr__("MODULE$")
        return self._objects[name]

    @cached_property
    def name_of(self) -> Any:
        """A JVM function that returns the name of an object's class in one call.

        `getClass` would need three calls, including the release of the class.
        """
        return self.find_class("org.apache.commons.lang3.ClassUtils").getName

    @cached_property
    def inline_cte(self) -> Any:
        return self.find_class(f"{OPTIMIZER}InlineCTE")(True, False)

    @cached_property
    def current_like(self) -> Any:
        return self.find_class(f"{SPARK}catalyst.trees.TreePattern").CURRENT_LIKE()

    @cached_property
    def plan_expression(self) -> Any:
        return self.find_class(f"{SPARK}catalyst.trees.TreePattern").PLAN_EXPRESSION()

    @cached_property
    def skip_mode(self) -> Any:
        """The argument of Spark's `executePlan` with which a command is analysed but not run."""
        return self.find_class(f"{SPARK}execution.CommandExecutionMode").SKIP()

    @cached_property
    def schema_json(self) -> Any:
        return self.find_class("org.apache.iceberg.SchemaParser").toJson

    @cached_property
    def snapshot_json(self) -> Any:
        return self.find_class("org.apache.iceberg.SnapshotParser").toJson


@lru_cache(maxsize=2)
def _create_statics(jvm: Any) -> JvmStatics:
    return JvmStatics(jvm)


def find_statics(spark: SparkSession) -> JvmStatics:
    return _create_statics(cast("Any", spark._jvm))
