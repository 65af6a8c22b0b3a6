// Products of many activation rows by plain weights: bf16, and FP8 codes that stand for bf16.
#include "common.cuh"
#include "quant.cuh"
#include "product.cuh"
#include "tile.cuh"

TILES(tile_wide, WIDE)
TILES(tile_bf16, BF16)
