"""Images in messages: from content parts to tokens in the rendered conversation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from engine.wire import Image
from gateway.images.decode import InvalidImage
from gateway.reading.endpoint import Model
from gateway.reading.images import ImageDecoder, check_images, check_length, with_images
from gateway.schemas.chat import ChatMessage
from gateway.schemas.content import ImagePart
from gateway.text.prepared import Ids


def image_parts(messages: Iterable[ChatMessage] | None) -> list[tuple[str, ImagePart]]:
    """Return the images of a conversation and the field of each, in order."""
    return [
        (f"messages[{number}].content[{place}]", part)
        for number, message in enumerate(messages or ())
        if isinstance(message.content, list)
        for place, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    ]


def refuse_images(messages: Iterable[ChatMessage] | None) -> None:
    """Raise :class:`InvalidImage` if a conversation has images, at an endpoint that reads none."""
    for param, _ in image_parts(messages):
        raise InvalidImage(f"`{param}`: images are not supported here; send text.", param=param, reason="endpoint")


class ChatImages:
    """The images of one conversation. It is falsy if there are none."""

    def __init__(self, messages: Iterable[ChatMessage], model: Model) -> None:
        """Decode the images. Raises :class:`InvalidImage`."""
        self._model = model
        self._request = ImageDecoder(model.facts, model.bounds, model.fetched)
        self._places = [self._request.add(part, param) for param, part in image_parts(messages)]
        if self._places:
            check_images(model.facts, self.images, self._places, "messages")

    def __bool__(self) -> bool:
        return bool(self._places)

    @property
    def images(self) -> list[Image]:
        """Each image once."""
        return self._request.images

    def check_texts(self, texts: Iterable[str]) -> None:
        """Raise :class:`InvalidImage` if one of ``texts``, whose control tokens are parsed, has the token of an image."""
        token = self._model.vocabulary.decode([self._request.vision.image_token], skip_special_tokens=False)
        if self and any(token in text for text in texts):
            message = f"A text contains {token!r}, which stands for an image, and `parse_special_tokens` is set; leave one out."
            raise InvalidImage(message, param="messages", reason="token")

    def put_into(self, row: Sequence[int]) -> Ids:
        """Return the rendered conversation ``row`` with the images' tokens. Raises :class:`InvalidImage` if the chat template does
        not show every image, and :class:`ContextExceeded`."""
        vision = self._request.vision
        at = [position for position, id in enumerate(row) if id == vision.image_token]
        if len(at) != len(self._places) or any(right == left + 1 for left, right in pairwise(at)):
            message = f"The model's chat template shows {len(at)} of the {len(self._places)} images."
            raise InvalidImage(f"{message} Put them into messages of the user.", param="messages", reason="template")
        whole = with_images(row, self._places, at, self.images, vision)
        check_length(self._model.facts, len(whole), "messages")
        return whole
