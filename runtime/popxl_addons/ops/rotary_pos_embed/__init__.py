"""Rotary position embedding: pairs of features rotated by angles that grow with the position."""

from popxl_addons.ops.rotary_pos_embed.rotary_pos_embed import (
    rotary_pos_embed,
    trig_table_constants,
    trig_tables,
)
