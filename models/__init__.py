"""Axes, tiers and sub-model plans (numpy only), and the registry of architectures (torch in `models.zoo` alone)."""

from models.architecture import Architecture, architecture, build
from models.axes import Axis, AxisKind
from models.cut import Cut
from models.dims import Dim
from models.draws import Window
from models.layout import Layout, Parameter, Statistic
from models.plan import Plan, compile_plan, make_plan, slice_weights
from models.registry import Registry, infer_layout
from models.slicing import CompiledPlan, Region
from models.tier import Tier

__all__ = [
    "Architecture",
    "Axis",
    "AxisKind",
    "CompiledPlan",
    "Cut",
    "Dim",
    "Layout",
    "Parameter",
    "Plan",
    "Region",
    "Registry",
    "Statistic",
    "Tier",
    "Window",
    "architecture",
    "build",
    "compile_plan",
    "infer_layout",
    "make_plan",
    "slice_weights",
]
