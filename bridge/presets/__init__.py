"""Presets: the jobs a machine may be asked for. The format is ``docs/schema/preset.json``."""

from bridge.presets.argv import show as show
from bridge.presets.argv import switches as switches
from bridge.presets.preset import ModelNeed as ModelNeed
from bridge.presets.preset import Preset as Preset
from bridge.presets.preset import Promise as Promise
from bridge.presets.preset import argv as argv
from bridge.presets.preset import evidence_name as evidence_name
from bridge.presets.preset import find as find
from bridge.presets.preset import get as get
from bridge.presets.preset import left_out as left_out
from bridge.presets.preset import load_all as load_all
from bridge.presets.preset import measures_commit as measures_commit
from bridge.presets.preset import model_names as model_names
from bridge.presets.preset import model_needs as model_needs
from bridge.presets.preset import model_parameter as model_parameter
from bridge.presets.preset import parse_cli as parse_cli
from bridge.presets.preset import read as read
from bridge.presets.preset import validate as validate
from bridge.presets.values import Parameter as Parameter
from bridge.presets.values import check_value as check_value
