// Split-K decode attention on a quantised latent, whose numbers are the values too, and its geometric stream.
//
// A warp copies its tiles of tokens to its own part of shared memory, makes keys of their codes, operands of products in
// registers, and weighs their scores. Four warps are a team: of all its tokens' values a warp has a fourth of the features, which
// it dequantises from the codes in place, so that its sums are few. Teams are on their own but where the queries are laid out, and
// at the end: while one waits, another multiplies.
//
// Macros: SEM_KIND, SEM_D, GEO_KIND, GEO_D (formats and widths), ROWS of a block (16 or 32), WARPS (4, 8, 12 or 16), BLOCKS
// (that a processor has at once), GROUPED (products of four warps, which Hopper has), SEM_STAGES, GEO_STAGES (tiles stored),
// GROUP heads of QUERIES queries, ROW_BLOCKS, HAS_WINDOW, FINAL (one split, which writes the output), TAIL_APART (the last split
// of FEW_SPLITS and more has the tail and nothing else), IN_BRAIN (queries are bfloat16, else float16), ANNOUNCED (see `launch_dependents`),
// SHARED_BYTES (of a block, as `latent.py` counts them).
#include "latent_end.cuh"
#include "latent_queries.cuh"
#include "latent_tail.cuh"

using Sem = Stream<SEM_KIND, SEM_D>;
using Geo = Stream<GEO_KIND, GEO_D>;
using Rows = Running<Sem>;
using Staged = Tail<Sem, Geo, SEM_KIND, GEO_KIND>;

constexpr int QUERY_BYTES = (Sem::STEPS + Geo::STEPS) * STEP_BYTES;
constexpr int WEIGHT_BYTES = TEAM * TILE / 16 * STEP_BYTES;  // of a team's tiles
constexpr int WARP_BYTES = max_of(SEM_STAGES * Sem::BYTES + GEO_STAGES * Geo::BYTES, Staged::BYTES);
// Where others read a tile's values too, the next one is asked for when all have: later, where it has a place of its own.
constexpr int SEM_AHEAD = max_of(SEM_STAGES - 1, 1);
// Largest numbers of warps, then maxima and sums of warps, then queries, weights and tiles, in whose place weighed values meet.
constexpr int SUMS_AT = 128, QUERIES_AT = SUMS_AT + WARPS * SUM_BYTES;
static_assert(QUERIES_AT + max_of(QUERY_BYTES + TEAMS * WEIGHT_BYTES + WARPS * WARP_BYTES, TEAMS * ROWS * OUT_BYTES) == SHARED_BYTES,
              "what latent.py counts");
static_assert(WARPS % TEAM == 0 && WARPS <= 16 && SEM_D % 64 == 0, "teams of four, each warp of which has whole products");

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) decode_latent(
    const u16* q_sem, const u16* q_geo, const u8* sem, const u8* geo, const u8* v, const u8* sem_scale, const u8* geo_scale,
    const u8* v_scale, const u16* sem_tail, const u16* geo_tail, const u16* v_tail, const int* seqlens, const int* packed,
    u16* out, float* sums, int qs_b, int qs_h, int qs_t, int qg_b, int qg_h, int qg_t, int sem_b, int sem_k, int sem_n,
    int geo_b, int geo_k, int geo_n, int v_b, int v_k, int v_n, int sem_zb, int sem_zk, int sem_zn, int geo_zb, int geo_zk,
    int geo_zn, int v_zb, int v_zk, int v_zn, int sem_tb, int sem_tk, int sem_tn, int geo_tb, int geo_tk, int geo_tn, int v_tb,
    int v_tk, int v_tn, int packed_b, int packed_capacity, int tail_capacity, int window) {
    wait_for_kernel_ahead();
    i64 b = block_x() / ROW_BLOCKS;
    int warp = warp_id(), team = warp / TEAM, member = warp % TEAM;
    int first = block_x() % ROW_BLOCKS * ROWS, split = block_y(), n_splits = grid_y();
    u32 shared = shared_address(shared_memory());
    u32 queries = shared + QUERIES_AT, geo_queries = queries + Sem::STEPS * STEP_BYTES;
    u32 weights = queries + QUERY_BYTES + team * WEIGHT_BYTES, exchanged = shared + SUMS_AT + team * TEAM * SUM_BYTES;
    u32 tiles_at = queries + QUERY_BYTES + TEAMS * WEIGHT_BYTES + team * TEAM * WARP_BYTES;  // the team's
    u32 own = tiles_at + member * WARP_BYTES, own_geo = own + SEM_STAGES * Sem::BYTES;

    int held = packed[b * packed_b], length = seqlens[b];
    // In flight together with the positions of the tokens, and used when the first tokens are in flight.
    Part<Sem, SEM_KIND> asked_sem;
    Part<Geo, GEO_KIND> asked_geo;
    asked_sem.load(q_sem + b * qs_b, qs_h, qs_t, first, warp);
    asked_geo.load(q_geo + b * qg_b, qg_h, qg_t, first, warp);
    held = max(min(held, packed_capacity), 0);
    length = min(length, held + tail_capacity);
    held = min(held, length);
    int start = HAS_WINDOW ? max(length - QUERIES + 1 - window, 0) / TILE * TILE : 0;
    bool is_apart = TAIL_APART && n_splits >= FEW_SPLITS;
    int tiles = (max(held - start, 0) + TILE - 1) / TILE, sharing = n_splits - is_apart;
    int each = u32(tiles + sharing - 1) / u32(sharing);
    // Where one of a team has a tile, so have all, with nothing in it where the split has ended.
    int begin_tile = min(split * each, tiles), end_tile = min((split + 1) * each, tiles);
    int tile = begin_tile + warp, last_tile = end_tile + member;
    int until = min(held, start + end_tile * TILE);

    sem += b * sem_b, geo += b * geo_b;
    sem_scale += b * sem_zb * Sem::SCALE_BYTES, geo_scale += b * geo_zb * Geo::SCALE_BYTES;
    auto copy_sem = [&](int which, int stage) {
        if (which < last_tile)
            copy_tile<Sem>(own + stage * Sem::BYTES, sem, sem_scale, sem_k, i64(sem_zk) * Sem::SCALE_BYTES, start + which * TILE, until);
        commit_copies();
    };
    auto copy_geo = [&](int which, int stage) {
        if (which < last_tile)
            copy_tile<Geo>(own_geo + stage * Geo::BYTES, geo, geo_scale, geo_k, i64(geo_zk) * Geo::SCALE_BYTES, start + which * TILE, until);
        commit_copies();
    };
    // Groups of copies alternate, so that as many may be in flight at each wait as there are later ones of both streams.
    constexpr int STAGES = max_of(SEM_AHEAD, GEO_STAGES);
#pragma unroll
    for (int i = 0; i < STAGES; ++i) {
        int g = i - (STAGES - GEO_STAGES), s = i - (STAGES - SEM_AHEAD);
        copy_geo(g < 0 ? last_tile : tile + g * WARPS, max(g, 0));
        copy_sem(s < 0 ? last_tile : tile + s * WARPS, max(s, 0));
    }
    // The queries are multiplied by a power of two, which changes no digit: float16 reaches less far than they may.
    float unit = unit_of_block(asked_geo.largest(asked_sem.largest(0)), shared, warp);
    float by = from_bits(0x7f000000u - to_bits(unit)) * LARGEST;
    asked_sem.store(queries, by, warp);
    asked_geo.store(geo_queries, by, warp);
    show_products();
    sync_block();
    by = unit / LARGEST * LOG2_E;  // what turns products to base 2

    Rows rows;
    rows.start();
    int sem_stage = 0, geo_stage = 0;
    for (; tile < last_tile; tile += WARPS) {
        int from = start + tile * TILE;
        u32 sem_tile = own + sem_stage * Sem::BYTES, geo_tile = own_geo + geo_stage * Geo::BYTES;
        Scores s;
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; ++n)
#pragma unroll
                for (int k = 0; k < 4; ++k) s[i][n][k] = 0;
        wait_copies<2 * GEO_STAGES - 1>();
        sync_warp();
        add_keys<Geo>(s, geo_tile, geo_queries);
        sync_warp();  // all lanes have read what is overwritten
        copy_geo(tile + GEO_STAGES * WARPS, geo_stage);
        wait_copies<2 * SEM_AHEAD - 1>();
        sync_warp();
        bool is_part = from + TILE > until;
        if (is_part) {
            clear_scales<Sem>(sem_tile, until - from);
            sync_warp();
        }
        add_keys<Sem>(s, sem_tile, queries);
        if (is_part || (QUERIES > 1 && from + TILE > length - QUERIES + 1) || (HAS_WINDOW && from < length - window))
#pragma unroll
            for (int i = 0; i < PRODUCTS; ++i) {
                int token = from + token_of(i, lane_id() / 4);
                hide(s[i / 2], i % 2, token, token < until, length, first, window);
            }
        rows.weigh<2>(s, weights, by, team, member, exchanged);
        int next_stage = (sem_stage + SEM_AHEAD) % SEM_STAGES;
        if (SEM_STAGES > 1) copy_sem(tile + SEM_AHEAD * WARPS, next_stage);  // the team has read what was there, as it weighs
        show_products();
        sync_team(team);
        add_values<Sem>(rows.acc, weights, tiles_at + sem_stage * Sem::BYTES, WARP_BYTES, member);
        if (SEM_STAGES == 1) {
            sync_team(team);
            copy_sem(tile + WARPS, 0);
        }
        sem_stage = sem_stage + 1 == SEM_STAGES ? 0 : sem_stage + 1;
        geo_stage = geo_stage + 1 == GEO_STAGES ? 0 : geo_stage + 1;
    }
    if (split == n_splits - 1) {
        sem_tail += b * sem_tb, geo_tail += b * geo_tb;
        sync_team(team);  // all have read the tiles in whose place tokens are staged
        // Teams that had a tile less than others begin.
        constexpr int TOGETHER = TEAM * TAIL_TOKENS;
        int before = (end_tile - begin_tile + TEAM - 1) / TEAM % TEAMS;
        for (int i = max(start - held, 0) / TAIL_TOKENS * TAIL_TOKENS + (team + TEAMS - before) % TEAMS * TOGETHER;
             i < length - held; i += TEAMS * TOGETHER) {
            Staged::add(rows, tiles_at, WARP_BYTES, queries, geo_queries, weights, exchanged, sem_tail, geo_tail, sem_tn, geo_tn,
                        held, i + member * TAIL_TOKENS, length, first, window, by, team, member);
        }
    }
    if (ANNOUNCED) launch_dependents();
    finish<Sem, SEM_KIND>(rows, warp, shared + SUMS_AT, queries, out, sums, (b * GROUP * QUERIES + first) * n_splits + split, n_splits,
                          GROUP * QUERIES - first);
}
