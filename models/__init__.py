"""Axes, tiers and sub-model plans, and the registry of architectures; `models.zoo` needs torch."""

from models.architecture import Architecture as Architecture
from models.architecture import architecture as architecture
from models.architecture import build as build
from models.axes import Axis as Axis
from models.axes import AxisKind as AxisKind
from models.cut import Cut as Cut
from models.dims import Dim as Dim
from models.draws import Window as Window
from models.layout import Layout as Layout
from models.parameters import Parameter as Parameter
from models.parameters import Statistic as Statistic
from models.plan import Plan as Plan
from models.plan import compile_plan as compile_plan
from models.plan import make_plan as make_plan
from models.plan import slice_weights as slice_weights
from models.registry import Registry as Registry
from models.registry import infer_layout as infer_layout
from models.slicing import CompiledPlan as CompiledPlan
from models.slicing import Region as Region
from models.tier import Tier as Tier
