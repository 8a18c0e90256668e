"""``/v1/completions``: prompts to token ids."""

from __future__ import annotations

from gateway.reading.endpoint import Endpoint, Model
from gateway.reading.prompts import characters_of, is_text, read_prompts
from gateway.reading.structure import is_constrained, read_bad_words, read_grammar
from gateway.schemas.completions import MAX_PROMPTS, CompletionRequest
from gateway.schemas.structure import BULK
from gateway.text.prepared import Prepared

LIGHT_PROMPTS = 128


def _read(request: CompletionRequest, model: Model) -> Prepared:
    prepared = read_prompts(
        model,
        request.prompt,
        "prompt",
        at_most=MAX_PROMPTS,
        sequences=request.sequences,
        echo=bool(request.echo),
        add_special_tokens=request.add_special_tokens is not False,
        parse_special_tokens=request.parse_special_tokens is not False,
    )
    prepared.grammar = read_grammar(request, model)
    prepared.bad_words = read_bad_words(request, model)
    return prepared


def _is_light(request: CompletionRequest) -> bool:
    if is_constrained(request):
        return False
    return not is_text(request.prompt) and (isinstance(request.prompt[0], int) or len(request.prompt) <= LIGHT_PROMPTS)


COMPLETIONS = Endpoint(
    kind=CompletionRequest,
    bulk={"prompt": "", "user": "", **BULK},
    read=_read,
    is_light=_is_light,
    characters=lambda request, _: characters_of(request.prompt),
)
