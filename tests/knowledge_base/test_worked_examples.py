"""The worked examples that base models predict questions by: their KV is computed once."""

import pytest

from kvweave.background.budget_trials import counted_rows
from kvweave.background.prediction import QuestionPredictor, request_prompt
from kvweave.background.prompts import FewShotPrompts

RECIPE = "reuse"
pytestmark = pytest.mark.usefixtures("chunks_computed_once")


@pytest.fixture
def base(open_kb, documents):
    kb = open_kb()
    kb.add(documents)
    return kb


def test_worked_examples_are_computed_once_and_replies_stay_the_same(base):
    context, options = base.components.request_context(), base._settings.options("Answer.")

    def predictor():
        return QuestionPredictor(
            lambda: context, base.state.documents, base.answers, base.predictions,
            base._settings.recipe_of(options), options, "Answer.", 0.9, 2,
        )  # fmt: skip

    request = FewShotPrompts().ask_for("3 May", "When")
    prompt = request_prompt(context.adapter.template, ["Another note."], request, "Answer.")
    examples = prompt.spans[1].end
    assert examples > prompt.tokens / 2
    replies, rows, own = [], [], predictor()
    for each in (own, own, predictor()):
        with counted_rows(context.adapter) as counted:
            replies.append(each.reply(["Another note."], request, 0))
        rows.append(counted[0])
    assert replies[0] == replies[1] == replies[2]
    # In the last layer only the last row of a prompt goes through attention.
    assert rows[0] == rows[2] == rows[1] + examples * (context.adapter.geometry.layers - 1)
