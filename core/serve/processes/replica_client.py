"""Several engines behind one `EngineClient`: each request goes to one; a dead engine ends only its own requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Unpack

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from hookline.core.errors import EngineError
from hookline.core.serve.engine_client import EngineLoad, ReplicaState, total_load
from hookline.core.serve.http.metrics import Families, families_in
from hookline.core.serve.processes.router import Router, prefix_keys

if TYPE_CHECKING:
    from hookline.core.pooling_params import PoolingParams
    from hookline.core.request_options import OptionKeys
    from hookline.core.sampling_params import SamplingParams
    from hookline.core.serve.processes.remote_client import RemoteClient
    from hookline.core.serve.processes.remote_stream import RemoteStream
    from hookline.core.serve.settings import ServeConfig
    from hookline.core.tokenizer.codec import Prompt

UP = "hookline_replica_up"


class ReplicaClient:
    """`EngineClient` over one client for each replica, in the order of their numbers."""

    def __init__(self, clients: Sequence[RemoteClient], settings: ServeConfig) -> None:
        self._clients, self.facts = clients, clients[0].facts
        self._router = Router(len(clients), settings.max_requests)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        session: str | None = None,
        pooling: PoolingParams | None = None,
        **keys: Unpack[OptionKeys],
    ) -> RemoteStream:
        """See EngineClient."""
        prefixes = prefix_keys(prompt, keys.get("cache_salt"), session) if pooling is None else []
        chosen = self._router.choose(
            prefixes, [one.num_at_engine if one.death is None else None for one in self._clients]
        )
        if chosen is None:
            raise EngineError(self.death or "no replica lives")
        return self._clients[chosen].stream(prompt, params, pooling=pooling, **keys)

    def load(self) -> EngineLoad:
        """See EngineClient: the sum of all replicas."""
        return total_load([one.load() for one in self._clients])

    @property
    def replicas(self) -> Sequence[ReplicaState]:
        """See EngineClient."""
        return [ReplicaState(one.death, one.load()) for one in self._clients]

    async def metrics(self) -> str:
        """See EngineClient. A replica that is dead or does not answer in time has only its `replica_up`, which is 0.

        Raises: EngineError if none answers.
        """
        asked = await asyncio.gather(*(one.metrics() for one in self._clients), return_exceptions=True)
        texts = {replica: text for replica, text in enumerate(asked) if isinstance(text, str)}
        if not texts:
            raise EngineError(self.death or "no replica tells its metrics")
        up = GaugeMetricFamily(UP, "Whether this replica's engine answers.", labels=["replica"])
        for replica in range(len(asked)):
            up.add_metric([str(replica)], replica in texts)
        return generate_latest(Families([up, *merged(texts)])).decode()

    @property
    def is_ready(self) -> bool:
        """See EngineClient."""
        return any(one.is_ready for one in self._clients)

    @property
    def death(self) -> str | None:
        """See EngineClient: the first one's, if all are dead."""
        deaths = [one.death for one in self._clients]
        return deaths[0] if all(one is not None for one in deaths) else None

    async def aclose(self) -> None:
        """See EngineClient."""
        for one in self._clients:
            await one.aclose()


def merged(texts: Mapping[int, str]) -> list[Metric]:
    """The metrics of several replicas, by their numbers; each sample gets the label `replica`."""
    found: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in families_in(text, replica=str(replica)):
            known = found.setdefault(family.name, family)
            if known is not family:
                known.samples.extend(family.samples)
    return list(found.values())
