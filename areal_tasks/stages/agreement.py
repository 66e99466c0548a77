"""Compares updated servers with the trainer on the table `scored`, which `train` writes where tokens were too old."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import torch

from areal_tasks.engines.client import GenerateRequest
from areal_tasks.engines.trainer.objective import agreement, agreement_totals, check_agreement, gaps, outside
from areal_tasks.stages.stage import Context
from areal_tasks.store.shards import read_table
from schemas.errors import UserError
from schemas.manifest import StageManifest
from schemas.recipe.recipe import RlhfRecipe


def check_servers(context: Context, train: StageManifest) -> dict[str, float]:
    """Have the servers, which hold the weights that `train` made, score the tokens of its table `scored`.

    Returns the metrics of their agreement with the trainer; none without such tokens, or without servers.

    Raises:
        Declined: they differ by more than `algorithm.max_logprob_gap`.
        UserError: a server does not give the log-probabilities of a prompt's tokens.
    """
    recipe, servers, ref = context.recipe, context.engines.servers, train.tables.get("scored")
    if ref is None or not ref.rows or not servers.count or not isinstance(recipe, RlhfRecipe):
        return {}
    table = read_table(context.store, ref)
    requests, client = requests_for(table), servers.inference(waits=False)
    results = servers.call(client.generate(requests), generates=client)
    by_server = torch.tensor([score for result in results for score in result.prompt_logprobs])
    by_trainer = torch.tensor(pc.list_flatten(table["scores"]).to_pylist())
    if len(by_server) != len(by_trainer):
        asked = ", ".join(sorted({result.server for result in results}))
        raise UserError(f"the servers ({asked}) scored {len(by_server)} of {len(by_trainer)} tokens of prompts")
    totals = agreement_totals(gaps(by_trainer, by_server), outside(by_trainer, by_server))
    found = agreement([[total] for total in totals])
    said = f"The servers were to generate with version {requests[0].floor}."
    check_agreement(found, recipe.algorithm.max_logprob_gap, len(by_server), said)
    return found | {"compared": float(len(by_server))}


def requests_for(table: pa.Table) -> list[GenerateRequest]:
    """For each row a request that scores its tokens under the row's version, by whichever server is free."""
    return [
        GenerateRequest(row["input_ids"], 1, group=number, floor=row["version"], scored_from=row["scored_from"])
        for number, row in enumerate(table.to_pylist())
    ]
