// Split-K decode attention on quantised keys and values of heads. A warp reads tokens of two key/value heads, whose queries are
// the eight columns of its products, through copies of its own: no warp waits for another until all have read their tokens.
//
// Codes are the left operands. A code in the lowest bits of float16 is a number below the smallest normal one, 2^-24 times the
// code and exact: no instruction makes it one. What is then too much of each (8 of q4_0, 128 of q8_0) is taken from sums, of
// keys before a product begins, of values every few tiles. Scales of keys go to products' results, those of values to weights.
//
// Macros: KIND_SEM, KIND_GEO, KIND_V (0 q8_0, 1 q4_0, 2 nf4), D_SEM, D_GEO (0 of keys of one part), D_V (features of a head),
// KV_HEADS, GROUP, QUERIES (GROUP * QUERIES is at most 8), WARPS, STAGES, BRAIN (queries and outputs are bfloat16, else float16),
// TAIL_BRAIN (tails are), TABLED (of two chunks of nf4's values those that a table makes numbers; 3 with keys), HAS_WINDOW,
// FINAL, ANNOUNCED.
// Grid: sequences times pairs of heads, and splits, of which the last has the tail for itself where there are several. Outputs
// are those of Triton's `split_kv_kernel`.
#include "heads_tail.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS, LEAST_BLOCKS) decode_heads(
    const u16* q_sem, const u16* q_geo, const u8* sem, const u8* geo, const u8* v, const u8* sem_scale, const u8* geo_scale,
    const u8* v_scale, const u16* sem_tail, const u16* geo_tail, const u16* v_tail, const int* seqlens, const int* packed,
    u16* out, float* sums, int qs_b, int qs_h, int qs_t, int qg_b, int qg_h, int qg_t, int sem_b, int sem_k, int sem_n,
    int geo_b, int geo_k, int geo_n, int v_b, int v_k, int v_n, int sem_zb, int sem_zk, int sem_zn, int geo_zb, int geo_zk,
    int geo_zn, int v_zb, int v_zk, int v_zn, int sem_tb, int sem_tk, int sem_tn, int geo_tb, int geo_tk, int geo_tn,
    int v_tb, int v_tk, int v_tn, int packed_b, int packed_capacity, int tail_capacity, int window) {
    wait_for_kernel_ahead();
    i64 b = block_x() / PAIRS;
    int pair = block_x() % PAIRS;
    u32 ring = shared_address(shared_memory()) + warp_id() * STAGES * STAGE;

    int held = max(min(packed[b * packed_b], packed_capacity), 0);
    int length = min(seqlens[b], held + tail_capacity);
    held = min(held, length);
    int start = HAS_WINDOW ? max(length - QUERIES + 1 - window, 0) / TOKENS * TOKENS : 0;

    // Tiles of this split, of which this warp has every WARPS-th.
    int last = grid_y() - 1, readers = max(last, 1), split = block_y();
    int n_tiles = (max(held - start, 0) + TOKENS - 1) / TOKENS;
    int each = n_tiles / readers, more = n_tiles % readers;
    int first = split * each + min(split, more);
    int end = split < readers ? first + each + (split < more) : first;
    bool has_tiles = first < end;
    first += warp_id();

    Copies from;
    from.stream[0] = {sem + b * sem_b + i64(pair * 2 * D_SEM / Sem::BLOCK) * sem_k, sem_k, sem_n,
                      sem_scale + (b * sem_zb + i64(pair * 2 * D_SEM / Sem::BLOCK) * sem_zk) * Sem::SCALE_BYTES, sem_zk};
    from.stream[1] = {geo + b * geo_b + i64(pair * 2 * D_GEO / Geo::BLOCK) * geo_k, geo_k, geo_n,
                      geo_scale + (b * geo_zb + i64(pair * 2 * D_GEO / Geo::BLOCK) * geo_zk) * Geo::SCALE_BYTES, geo_zk};
    from.stream[2] = {v + b * v_b + i64(pair * 2 * D_V / Values::BLOCK) * v_k, v_k, v_n,
                      v_scale + (b * v_zb + i64(pair * 2 * D_V / Values::BLOCK) * v_zk) * Values::SCALE_BYTES, v_zk};
    for (int stage = 0; stage < STAGES - 1; ++stage) {
        int tile = first + stage * WARPS;
        if (tile < end) from.tile(ring + stage * STAGE, start + tile * TOKENS, held);
        commit_copies();
    }

    Rows rows;
    rows.load(q_sem + b * qs_b, q_geo + b * qg_b, qs_h, qs_t, qg_h, qg_t, pair);
    rows.see(length, window);
    Sums own;
    own.clear();

    Levels levels(seqlens[b] < 0);
    Table table{shared_address(shared_memory()) + WARPS * STAGES * STAGE + 4 * lane_id()};
    if (TABLED > 0 && has_tiles) {
        Table::fill(table.own - 4 * lane_id(), levels);
        sync_block();
    }
    int stage = 0, since = 0;
    for (int tile = first; tile < end; tile += WARPS) {
        wait_copies<STAGES - 2>();
        sync_warp();
        // Where the tile before this was, which all lanes have read.
        int next = tile + (STAGES - 1) * WARPS;
        u32 to = ring + (stage == 0 ? STAGES - 1 : stage - 1) * STAGE;
        if (next < end) from.tile(to, start + next * TOKENS, held);
        commit_copies();

        int i = start + tile * TOKENS;
        u32 at = ring + stage * STAGE;
        float s[N_TILES][M_TILES][4];
        scores(s, at, rows, pair, levels, table);
        bool is_whole = i + TOKENS <= held && (!(HAS_WINDOW || QUERIES > 1) || rows.sees_all(i, TOKENS));
        if (is_whole)
            own.read<false>(s, at, rows, i, held, levels, table);
        else
            own.read<true>(s, at, rows, i, held, levels, table);
        if (++since == SETTLED) {
            own.settle();
            since = 0;
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    own.settle();
    own.as_numbers();
    if (split == last)
        for (int i = max(held, start) + 16 * warp_id(); i < length; i += 16 * WARPS)
            read_tail(own, rows, sem_tail + b * sem_tb, geo_tail + b * geo_tb, v_tail + b * v_tb, sem_tk, sem_tn, geo_tk, geo_tn,
                      v_tk, v_tn, pair, i, held, length);
    if (ANNOUNCED) launch_dependents();
    wait_copies<0>();
    sync_block();
    own.merge(out, sums, b, pair, split, grid_y());
}
