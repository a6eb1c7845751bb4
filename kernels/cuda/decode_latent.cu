// Split-K decode attention on a quantised latent, whose numbers are the values too, and its geometric stream.
//
// A warp is on its own: it copies its tiles of tokens to its own part of shared memory, makes codes to operands of products in
// registers, and keeps maxima, sums and weighed values of all the block's rows. The warps meet when the queries are laid out,
// and at the end.
//
// Macros: SEM_KIND, SEM_D, GEO_KIND, GEO_D (formats and widths), ROWS of a block (16 or 32), WARPS (at most 8),
// SEM_STAGES, GEO_STAGES (tiles held), UNROLLED (groups of chunks of keys written out), GROUP heads of QUERIES queries, ROW_BLOCKS, HAS_WINDOW, FINAL (one split, which writes
// the output), TAIL_APART (the last split of several has the tail and nothing else), IN_BRAIN (queries are bfloat16, else
// float16), SHARED_BYTES (of a block, as `latent.py` counts them).
#include "latent_end.cuh"
#include "latent_tail.cuh"

using Sem = Stream<SEM_KIND, SEM_D>;
using Geo = Stream<GEO_KIND, GEO_D>;
using Rows = Running<Sem>;
using Staged = Tail<Sem, Geo, SEM_KIND, GEO_KIND>;

constexpr int QUERY_BYTES = (Sem::STEPS + Geo::STEPS) * ROW_TILES * FRAGMENTS;
constexpr int WARP_BYTES = max_of(SEM_STAGES * Sem::BYTES + GEO_STAGES * Geo::BYTES, Staged::BYTES);
// Units of rows, then maxima and sums of warps, then queries and tiles, in whose place weighed values meet.
constexpr int SUMS_AT = 128, QUERIES_AT = SUMS_AT + WARPS * ROWS * 8;
static_assert(QUERIES_AT + max_of(QUERY_BYTES + WARPS * WARP_BYTES, WARPS * ROWS * OUT_BYTES) == SHARED_BYTES,
              "what latent.py counts");
static_assert(ROW_TILES * SEM_D <= 256, "a lane's sums lie in its registers");

// The queries of rows g, g + 8, ... of a block, as a lane lays them out.
struct Asked {
    Part<Sem, SEM_KIND> sem[OWN];
    Part<Geo, GEO_KIND> geo[OWN];

    DEVICE void load(const u16* q_sem, const u16* q_geo, int sem_h, int sem_t, int geo_h, int geo_t, int first) {
#pragma unroll
        for (int r = 0; r < OWN; ++r) {
            int row = first + 8 * r;
            bool is_row = row < GROUP * QUERIES;
            sem[r].load(q_sem + row / QUERIES * sem_h + row % QUERIES * sem_t, is_row);
            geo[r].load(q_geo + row / QUERIES * geo_h + row % QUERIES * geo_t, is_row);
        }
    }

    // Put them into shared memory, and what turns products of their rows to base 2. A row is multiplied by a power of two,
    // which changes no digit: float16 reaches less far than queries may.
    DEVICE void lay_out(u32 shared, int g) const {
        float by[OWN];
#pragma unroll
        for (int r = 0; r < OWN; ++r) {
            float top = largest_of_lanes(geo[r].largest(sem[r].largest(0)));
            float unit = min(max(from_bits(to_bits(top) & 0x7f800000u), SMALLEST), 0x1p126f);
            by[r] = from_bits(0x7f000000u - to_bits(unit)) * LARGEST;
            if (lane_id() == 0) store_shared_f32(shared + (8 * r + g) * 4, unit / LARGEST * LOG2_E);
        }
        u32 at = shared + QUERIES_AT, geo_at = at + Sem::STEPS * ROW_TILES * FRAGMENTS;
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m) {
            store<Sem, SEM_KIND>(at, sem[2 * m], sem[2 * m + 1], by[2 * m], by[2 * m + 1], m, g);
            store<Geo, GEO_KIND>(geo_at, geo[2 * m], geo[2 * m + 1], by[2 * m], by[2 * m + 1], m, g);
        }
    }
};

// Make scores minus infinity that a lane's rows do not see, of the tokens from `from` and before `until`.
DEVICE void hide(Scores& s, int from, int until, const int (&end)[OWN], int window) {
#pragma unroll
    for (int r = 0; r < OWN; ++r)
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i)
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                int token = from + token_of(i, 2 * (lane_id() % 4) + k);
                bool is_seen = token < until && token < end[r];
                if (HAS_WINDOW) is_seen = is_seen && token >= end[r] - window;
                if (!is_seen) s[r / 2][i][r % 2 * 2 + k] = minus_infinity();
            }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) decode_latent(
    const u16* q_sem, const u16* q_geo, const u8* sem, const u8* geo, const u8* v, const u8* sem_scale, const u8* geo_scale,
    const u8* v_scale, const u16* sem_tail, const u16* geo_tail, const u16* v_tail, const int* seqlens, const int* packed,
    u16* out, float* sums, int qs_b, int qs_h, int qs_t, int qg_b, int qg_h, int qg_t, int sem_b, int sem_k, int sem_n,
    int geo_b, int geo_k, int geo_n, int v_b, int v_k, int v_n, int sem_zb, int sem_zk, int sem_zn, int geo_zb, int geo_zk,
    int geo_zn, int v_zb, int v_zk, int v_zn, int sem_tb, int sem_tk, int sem_tn, int geo_tb, int geo_tk, int geo_tn, int v_tb,
    int v_tk, int v_tn, int packed_b, int packed_capacity, int tail_capacity, int window) {
    i64 b = block_x() / ROW_BLOCKS;
    int first = block_x() % ROW_BLOCKS * ROWS, split = block_y(), n_splits = grid_y();
    u32 shared = shared_address(shared_memory());
    u32 queries = shared + QUERIES_AT, geo_queries = queries + Sem::STEPS * ROW_TILES * FRAGMENTS;
    u32 own = queries + QUERY_BYTES + warp_id() * WARP_BYTES, own_geo = own + SEM_STAGES * Sem::BYTES;

    int held = packed[b * packed_b], length = seqlens[b];
    // On their way beside what says where the tokens are, and used when the first tokens are on theirs.
    q_sem += b * qs_b, q_geo += b * qg_b;
    Asked asked;
    asked.load(q_sem, q_geo, qs_h, qs_t, qg_h, qg_t, first + warp_id());
    held = max(min(held, packed_capacity), 0);
    length = min(length, held + tail_capacity);
    held = min(held, length);
    int start = HAS_WINDOW ? max(length - QUERIES + 1 - window, 0) / TILE * TILE : 0;
    bool is_apart = TAIL_APART && n_splits > 1;
    int tiles = (max(held - start, 0) + TILE - 1) / TILE, sharing = n_splits - is_apart;
    int each = (tiles + sharing - 1) / sharing;
    int tile = min(split * each, tiles) + warp_id(), end_tile = min((split + 1) * each, tiles);

    sem += b * sem_b, geo += b * geo_b;
    sem_scale += b * sem_zb * Sem::SCALE_BYTES, geo_scale += b * geo_zb * Geo::SCALE_BYTES;
    auto copy_sem = [&](int which, int stage) {
        if (which < end_tile)
            copy_tile<Sem>(own + stage * Sem::BYTES, sem, sem_scale, sem_k, i64(sem_zk) * Sem::SCALE_BYTES, start + which * TILE, held);
        commit_copies();
    };
    auto copy_geo = [&](int which, int stage) {
        if (which < end_tile)
            copy_tile<Geo>(own_geo + stage * Geo::BYTES, geo, geo_scale, geo_k, i64(geo_zk) * Geo::SCALE_BYTES, start + which * TILE, held);
        commit_copies();
    };
    // Groups of copies alternate, so that as many may be on their way at each wait as there are later ones of both streams.
    constexpr int STAGES = max_of(SEM_STAGES, GEO_STAGES);
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
        int g = i - (STAGES - GEO_STAGES), s = i - (STAGES - SEM_STAGES);
        copy_geo(g < 0 ? end_tile : tile + g * WARPS, max(g, 0));
        copy_sem(s < 0 ? end_tile : tile + s * WARPS, max(s, 0));
    }
    for (int g = warp_id(); g < 8; g += WARPS) {
        if (g >= WARPS) asked.load(q_sem, q_geo, qs_h, qs_t, qg_h, qg_t, first + g);
        asked.lay_out(shared, g);
    }
    sync_block();

    Rows rows;
    rows.start();
    float by[OWN];
    int end[OWN];  // of the tokens that a row sees
#pragma unroll
    for (int r = 0; r < OWN; ++r) {
        int row = 8 * r + lane_id() / 4;
        by[r] = load_shared_f32(shared + row * 4);
        end[r] = length - QUERIES + 1 + (first + row) % QUERIES;
    }
    int sem_stage = 0, geo_stage = 0;
    for (; tile < end_tile; tile += WARPS) {
        int from = start + tile * TILE;
        u32 sem_tile = own + sem_stage * Sem::BYTES, geo_tile = own_geo + geo_stage * Geo::BYTES;
        Scores s;
#pragma unroll
        for (int m = 0; m < ROW_TILES; ++m)
#pragma unroll
            for (int i = 0; i < PRODUCTS; ++i)
#pragma unroll
                for (int k = 0; k < 4; ++k) s[m][i][k] = 0;
        wait_copies<2 * GEO_STAGES - 1>();
        sync_warp();
        add_keys<Geo>(s, geo_tile, geo_queries);
        sync_warp();  // all lanes have read what is overwritten
        copy_geo(tile + GEO_STAGES * WARPS, geo_stage);
        wait_copies<2 * SEM_STAGES - 1>();
        sync_warp();
        bool is_part = from + TILE > held;
        if (is_part) {
            clear_scales<Sem>(sem_tile, held - from);
            sync_warp();
        }
        add_keys<Sem>(s, sem_tile, queries);
        if (is_part || (QUERIES > 1 && from + TILE > length - QUERIES + 1) || (HAS_WINDOW && from < length - window))
            hide(s, from, held, end, window);
        u32 weights[ROW_TILES][PRODUCTS / 2][4];
        rows.weigh<PRODUCTS>(s, weights, by);
        add_values<Sem>(rows.acc, weights, sem_tile);
        sync_warp();
        copy_sem(tile + SEM_STAGES * WARPS, sem_stage);
        sem_stage = sem_stage + 1 == SEM_STAGES ? 0 : sem_stage + 1;
        geo_stage = geo_stage + 1 == GEO_STAGES ? 0 : geo_stage + 1;
    }
    if (split == n_splits - 1) {
        sem_tail += b * sem_tb, geo_tail += b * geo_tb;
        // Warps that had a tile less than others begin.
        int before = is_apart ? 0 : max(end_tile - min(split * each, tiles), 0) % WARPS;
        for (int i = max(start - held, 0) / TAIL_TOKENS * TAIL_TOKENS + (warp_id() + WARPS - before) % WARPS * TAIL_TOKENS;
             i < length - held; i += WARPS * TAIL_TOKENS) {
            Staged::add(rows, own, queries, geo_queries, sem_tail, geo_tail, sem_tn, geo_tn, held, i, length, end, window, by);
        }
    }
    finish<Sem, SEM_KIND>(rows, shared + SUMS_AT, queries, out, sums, (b * GROUP * QUERIES + first) * n_splits + split, n_splits,
                          GROUP * QUERIES - first);
}
