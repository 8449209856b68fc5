"""`functools.cached_property` as it is from Python 3.12 on: without a lock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

Made = TypeVar("Made")


class cached_property(Generic[Made]):
    """An attribute that is computed when it is first read; two threads may both compute it.

    Python 3.11 holds one lock for all instances of a class: a process that is forked meanwhile waits for ever.

    >>> class Circle:
    ...     @cached_property
    ...     def area(self):
    ...         print("computed")
    ...         return 3.14
    >>> circle = Circle()
    >>> circle.area, circle.area
    computed
    (3.14, 3.14)
    """

    def __init__(self, make: Callable[[Any], Made]):
        self.make = make
        self.__doc__ = make.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: Any, owner: type | None = None) -> Made:
        # Once it is in the instance's dict, Python finds it there and does not come here.
        made = instance.__dict__[self.name] = self.make(instance)
        return made
