"""What a request's custom parameters ask for, and every way in which they may be malformed."""

from __future__ import annotations

import math

import msgspec
import pytest

from engine_patches.budget import Budget, BudgetError, Wish, wish_of

DEFAULT = Budget(tokens=100)


@pytest.mark.parametrize("custom", [None, {}, [], "text", 7, True, {"temperature": 1, "other": {}}])
@pytest.mark.parametrize("retains", [True, False])
@pytest.mark.parametrize("default", [None, DEFAULT])
def test_who_says_nothing_gets_the_servers_budget(custom, retains, default):
    assert wish_of(custom, default, retains) == Wish(default, positions=False)


@pytest.mark.parametrize(
    ("custom", "without", "with_default"),
    [
        ({"kv_budget_tokens": 7}, Budget(tokens=7), Budget(tokens=7)),
        ({"kv_budget_tokens": 100}, Budget(tokens=100), Budget(tokens=100)),
        ({"kv_budget_ratio": 0.5}, Budget(ratio=0.5), Budget(ratio=0.5)),
        ({"kv_budget_ratio": 1}, Budget(ratio=1.0), Budget(ratio=1.0)),
        ({"kv_retention": "on", "kv_budget_tokens": 7}, Budget(tokens=7), Budget(tokens=7)),
        ({"kv_retention": "off"}, None, None),
        ({"kv_retention": None}, None, DEFAULT),
        ({"kv_positions": True}, None, DEFAULT),
        ({"other": 1, "kv_budget_tokens": 7}, Budget(tokens=7), Budget(tokens=7)),
    ],
)
def test_a_request_goes_before_the_server(custom, without, with_default):
    positions = custom.get("kv_positions", False)
    assert wish_of(custom, None, True) == Wish(without, positions)
    assert wish_of(custom, DEFAULT, True) == Wish(with_default, positions)
    share = Budget(ratio=0.1)
    expected = share if with_default == DEFAULT != without else with_default
    assert wish_of(custom, share, True) == Wish(expected, positions)


def test_on_takes_the_servers_budget():
    assert wish_of({"kv_retention": "on"}, DEFAULT, True) == Wish(DEFAULT)
    with pytest.raises(BudgetError, match="this server has no default"):
        wish_of({"kv_retention": "on"}, None, True)


def test_positions_may_be_asked_for_where_nothing_is_frozen():
    asked = {"kv_retention": "off", "kv_positions": True}
    assert wish_of(asked, DEFAULT, True) == Wish(None, positions=True)


TOKENS = "kv_budget_tokens must be a whole number of tokens, 1 or more; found "
RATIO = "kv_budget_ratio must be a share of the prompt, above 0 up to 1; found "
MALFORMED = [
    *(({"kv_budget_tokens": x}, TOKENS + repr(x)) for x in (0, -3, 2.0, 2.5, "7", True, None, [7])),
    *(
        ({"kv_budget_ratio": x}, RATIO + repr(x))
        for x in (0, 0.0, -0.5, 1.01, 2, "0.5", True, None, {}, math.nan, math.inf)
    ),
    *(
        ({"kv_retention": x}, f'kv_retention must be "on" or "off"; found {x!r}')
        for x in ("maybe", "ON", "", True, 1, ["on"], {})
    ),
    *(
        ({"kv_positions": x}, f"kv_positions must be true or false; found {x!r}")
        for x in ("true", 1, 0, None, [])
    ),
    ({"kv_budget_tokens": 5, "kv_budget_ratio": 0.5}, "give kv_budget_tokens or kv_budget_ratio"),
    ({"kv_budget_tokens": None, "kv_budget_ratio": 0.5}, "give kv_budget_tokens or kv_budget_"),
    ({"kv_retention": "off", "kv_budget_tokens": 7}, 'kv_retention "off" takes no budget'),
    ({"kv_retention": "off", "kv_budget_tokens": 100}, 'kv_retention "off" takes no budget'),
    ({"kv_retention": "off", "kv_budget_ratio": 0.5}, 'kv_retention "off" takes no budget'),
    ({"kv_budget": 7}, "custom_params has no 'kv_budget'; RaggedKV takes kv_retention, kv_budget_"),
    ({"kv_": 7, "kv_budget_tokens": 7}, "custom_params has no 'kv_'"),
]


@pytest.mark.parametrize("default", [None, DEFAULT])
@pytest.mark.parametrize(("custom", "message"), MALFORMED, ids=lambda x: str(x)[:40])
def test_a_malformed_parameter_is_one_line_that_names_it(custom, message, default):
    with pytest.raises(BudgetError) as error:
        wish_of(custom, default, True)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
    assert isinstance(error.value, ValueError)  # which SGLang answers with status 400


@pytest.mark.parametrize("key", ["kv_retention", "kv_budget_tokens", "kv_budget_ratio"])
def test_a_server_that_cannot_freeze_says_so(key):
    values = {"kv_retention": "off", "kv_budget_tokens": 7, "kv_budget_ratio": 0.5}
    with pytest.raises(BudgetError, match=f"{key} needs a server whose --kv-policy can freeze"):
        wish_of({key: values[key]}, None, False)
    with pytest.raises(BudgetError, match="has no 'kv_typo'"):
        wish_of({"kv_typo": 1}, None, False)


@pytest.mark.parametrize(
    ("budget", "prompt", "kept"),
    [
        (Budget(tokens=7), 3, 7),
        (Budget(tokens=7), 700, 7),
        (Budget(ratio=0.25), 100, 25),
        (Budget(ratio=0.25), 101, 26),
        (Budget(ratio=0.07), 100, 7),
        (Budget(ratio=0.001), 9, 1),
        (Budget(ratio=1.0), 9, 9),
    ],
)
def test_a_budget_of_a_prompt(budget, prompt, kept):
    assert budget.of(prompt) == kept


def test_a_budget_reads_as_its_flag_and_survives_json():
    assert (str(Budget(tokens=512)), str(Budget(ratio=0.05))) == ("512 tokens", "0.05 of a prompt")
    for budget in (Budget(tokens=512), Budget(ratio=0.05)):
        assert msgspec.json.decode(msgspec.json.encode(budget), type=Budget) == budget
