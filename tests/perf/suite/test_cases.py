"""Cases are selected by name or alias, in the order of the patterns."""

import pytest

from tritoncp.perf.problem import MODELS
from tritoncp.perf.suite.cases import CASES, select

ALIASES = {"gemma4-global": "Gemma 4 31B", "mla-absorbed": "DeepSeek-V3, absorbed"}


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_selects_both_passes_of_the_layer_of_a_model(alias):
    selected = select("full", alias)
    assert [case.which for case in selected] == ["forward", "backward"]
    for case in selected:
        assert {name: getattr(case.problem, name) for name in MODELS[ALIASES[alias]]} == MODELS[
            ALIASES[alias]
        ]


def test_no_alias_is_the_name_of_a_case():
    aliases = {case.alias for case in CASES} - {""}
    assert aliases == {*ALIASES} and aliases.isdisjoint(case.name for case in CASES)


def test_names_and_aliases_keep_the_order_of_the_patterns():
    names = [case.name for case in select("full", ["mla-*", "causal-8k-fwd", "*-d512x512-*"])]
    mla, gemma = (
        [case.name for case in select("full", alias)] for alias in ("mla-absorbed", "gemma4-global")
    )
    assert names == [*mla, "causal-8k-fwd", *gemma]
    assert len(select("full", ["mla-absorbed", "causal-*"])) == len(select("full", "causal-*"))
