"""The class of each state of the agent.

A state posts events and never chooses its successor; ``device_runtime.agent.machine`` does.
"""

from collections.abc import Mapping
from types import MappingProxyType

from device_runtime.agent.machine import State
from device_runtime.agent.states.base import DeviceState
from device_runtime.agent.states.computing import Measuring, Sizing, Training
from device_runtime.agent.states.ending import Dropping, Refusing, Stopped
from device_runtime.agent.states.fetching import Fetching
from device_runtime.agent.states.idle import Idle
from device_runtime.agent.states.starting import Probing, Starting
from device_runtime.agent.states.uploading import Uploading

STATES: Mapping[State, type[DeviceState]] = MappingProxyType(
    {
        State.STARTING: Starting,
        State.PROBING: Probing,
        State.IDLE: Idle,
        State.FETCHING: Fetching,
        State.SIZING: Sizing,
        State.TRAINING: Training,
        State.MEASURING: Measuring,
        State.UPLOADING: Uploading,
        State.REFUSING: Refusing,
        State.DROPPING: Dropping,
        State.STOPPED: Stopped,
    }
)
