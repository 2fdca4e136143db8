"""Meaning of the kernels that look rows up and fetch them; the twins of `HotRows` on tensors."""

import torch

from shared.engine.kernels.hot_tables import BatchBlocks, HotTables, MissPlan, Resolution

_EMPTY = -1


def resolve_rows(
    positions: torch.Tensor,  # [num_requests, num_queries, top_k] int32, -1 = none
    blocks: BatchBlocks,
    tables: HotTables,  # changed in place
    group_idx: int,
    out: Resolution,  # changed in place
) -> None:
    """Each position's device row; cold ones through the lease's hot rows, all queries at once."""
    for request, lease in enumerate(blocks.leases.tolist()):
        chosen = positions[request].flatten().long()
        is_chosen = chosen >= 0
        block = blocks.page_table[request, chosen.clamp_min(0) // 64].long()
        first = blocks.first_rows[block]
        is_resident, is_cold = is_chosen & (first >= 0), is_chosen & (first < 0)
        rows = torch.where(is_resident, first + chosen % 64, -1)
        wanted = (block * 64 + chosen % 64)[is_cold].tolist()
        hits = 0
        missing: list[int] = []
        if lease >= 0 and wanted:
            keys = tables.keys[group_idx, lease]
            hits, missing = _look_up(wanted, keys, tables.order[group_idx, lease])
            slot_of = {key: slot for slot, key in enumerate(keys.tolist()) if key != _EMPTY}
            slots = torch.tensor([slot_of[key] for key in wanted])
            rows[is_cold] = tables.pages[lease, slots // 64].long() * 64 + slots % 64
        row_of = dict(zip(wanted, rows[is_cold].tolist(), strict=True))
        out.row_ids[request] = rows.view_as(positions[request]).int()
        fetched = torch.tensor([row_of[key] for key in missing], dtype=torch.int32)
        out.plan.host_rows[request, : len(missing)] = torch.tensor(missing, dtype=torch.int32)
        out.plan.device_rows[request, : len(missing)] = fetched
        out.plan.num_misses[request] = len(missing)
        unplaced = len(wanted) if lease < 0 else 0
        out.counts[request] = torch.tensor([int(is_resident.sum()), hits, unplaced])


def _look_up(
    wanted: list[int],
    keys: torch.Tensor,  # [hot_rows] int32, changed in place
    order: torch.Tensor,  # [hot_rows] int16, changed in place
) -> tuple[int, list[int]]:  # distinct rows found, the missing ones in order
    slot_of = {key: slot for slot, key in enumerate(keys.tolist()) if key != _EMPTY}
    unique = list(dict.fromkeys(wanted))
    found = {slot_of[key] for key in unique if key in slot_of}
    missing = [key for key in unique if key not in slot_of]
    unwanted = [slot for slot in order.tolist() if slot not in found]
    filled = set(slot_of.values())
    unwanted.sort(key=lambda slot: slot in filled)  # stable: empty rows go first
    victims, kept = unwanted[: len(missing)], unwanted[len(missing) :]
    keys[victims] = torch.tensor(missing, dtype=torch.int32)
    hits = [slot for slot in order.tolist() if slot in found]
    order.copy_(torch.tensor(kept + victims + hits))
    return len(found), missing


def forget_rows(
    host_rows: torch.Tensor,  # [num_requests, num_rows] int32, -1 = none
    leases: torch.Tensor,  # [num_requests] int32, -1 = none
    tables: HotTables,  # changed in place
) -> None:
    """No hot row of the request's lease holds one of its rewritten rows any longer."""
    for rewritten, lease in zip(host_rows, leases.tolist(), strict=True):
        if lease >= 0:
            keys = tables.keys[:, lease]
            keys[torch.isin(keys, rewritten)] = _EMPTY


def host_gather(
    host_rows: torch.Tensor,  # [num_host_rows, 656] uint8
    device_rows: torch.Tensor,  # [num_device_rows, 656] uint8, changed in place
    plan: MissPlan,
) -> None:
    """Each missing row's bytes are in its device row."""
    for request, count in enumerate(plan.num_misses.tolist()):
        target = plan.device_rows[request, :count].long()
        device_rows[target] = host_rows[plan.host_rows[request, :count].long()]
