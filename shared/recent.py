"""Ids remembered for a while: messages about a request may arrive after it, or before it."""

from collections import OrderedDict

_NUM_KEPT = 4096  # minutes of traffic; a late message is seconds late


class Recent:
    """The last few thousand ids that were added."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()

    def add(self, request_id: str) -> None:
        """Remember this id."""
        self._ids[request_id] = None
        if len(self._ids) > _NUM_KEPT:
            self._ids.popitem(last=False)

    def forget(self, request_id: str) -> None:
        """As if it had not been added."""
        self._ids.pop(request_id, None)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids
