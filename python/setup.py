"""Gives the wheel the tag of programs for this machine that need no certain Python."""

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.dist import Distribution


class Binary(Distribution):
    """A distribution that is not the same on every machine."""

    def has_ext_modules(self):
        return True


class AnyPython(bdist_wheel):
    """A wheel whose libraries no Python loads as modules."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(distclass=Binary, cmdclass={"bdist_wheel": AnyPython})
