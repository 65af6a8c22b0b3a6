// The keys that a row attends to: the window's entries, oldest first, padded with absent ones to the window's
// size; compressed slots ascending; the rows of a draft block. Needs state.cuh.

#define BLOCK 64 /* entries to a block of attention */

// The keys of all rows of a pass.
struct KeyList {
    const Row* rows;
    const LayerState* states;
    int places;
    int place;
    int window;
    int ratio;        // 0: window only
    const int* picks; // [m, topk], or null: every visible slot
    int topk;
    const u16* block; // rows of a draft block, or null
    int block_rows;
};

// The list of one row.
struct List {
    const u16* window;
    const u16* slots;
    const u16* block;
    const int* picks;
    int window_rows, first, present, window_size, slot_count, length;
};

DEV List list_of(const KeyList& keys, int at) {
    List list;
    Row row = keys.rows[at];
    LayerState state = keys.states[(u64)row.slot * keys.places + keys.place];
    // A draft block sees the window up to the position in front of it.
    int last = keys.block ? keys.rows[0].pos - 1 : row.pos;
    int visible = keys.ratio > 0 ? (row.pos + 1) / keys.ratio : 0;
    bool picked = keys.picks && visible > keys.topk;
    list.window = state.window;
    list.window_rows = state.window_rows;
    list.present = last + 1 < keys.window ? last + 1 : keys.window;
    list.first = last + 1 - list.present;
    list.window_size = keys.window;
    list.slots = state.attention.slots;
    list.picks = picked ? keys.picks + (u64)at * keys.topk : 0;
    list.slot_count = picked ? keys.topk : visible;
    list.block = keys.block;
    list.length = keys.window + list.slot_count + keys.block_rows;
    return list;
}

DEV bool present(const List& list, int i) { return i < list.present || (i >= list.window_size && i < list.length); }

// Entry i, which is present.
DEV const u16* entry(const List& list, int i, int width) {
    if (i < list.window_size) return list.window + (u64)((list.first + i) % list.window_rows) * width;
    i -= list.window_size;
    if (i < list.slot_count) return list.slots + (u64)(list.picks ? list.picks[i] : i) * width;
    return list.block + (u64)(i - list.slot_count) * width;
}
