// What a warp of decode_heads.cu keeps of the tokens it has read: sums of values by their weights.
#ifndef CARAMBA_HEADS_SUMS_CUH
#define CARAMBA_HEADS_SUMS_CUH
#include "heads.cuh"

constexpr int V_TILES = D_V / 16;  // of features of a head: lane l has features 16 t + 2g and the next of tile t
constexpr bool IN_BRAIN = BRAIN && TAIL_BRAIN;  // tails are read in bfloat16, in which queries are exact as well
constexpr int PART_ROWS = 2 * COLUMNS, PART = PART_ROWS * D_V;  // numbers that a warp hands to others at the end
constexpr int MERGE_BYTES = WARPS * (PART + 2 * PART_ROWS) * 4;
static_assert(MERGE_BYTES <= WARPS * STAGES * STAGE, "what warps hand over lies where their tiles were");

// A weight is 2^(score - ref), where ref = top + log2(wide) - LIFT: so that its product with a scale is in float16's range
// with `top` near the largest score, and `wide` near the largest scale of values.
struct Sums {
    float acc[2][V_TILES][4];                // of a head; columns that are the other's are of no use
    float total[N_TILES][2];                 // of weights, of this lane's tokens
    float spare[N_TILES][Values::PARTS][2];  // of weights times scales, of this lane's tokens, since the last `settle`
    float top[N_TILES][2], ref[N_TILES][2], wide[N_TILES];

    DEVICE void clear() {
        for (int head = 0; head < 2; ++head)
            for (int t = 0; t < V_TILES; ++t)
                for (int k = 0; k < 4; ++k) acc[head][t][k] = 0.0f;
        for (int n = 0; n < N_TILES; ++n) {
            wide[n] = SMALLEST;
            for (int e = 0; e < 2; ++e) {
                total[n][e] = ref[n][e] = 0.0f;
                top[n][e] = minus_infinity();
                for (int part = 0; part < Values::PARTS; ++part) spare[n][part][e] = 0.0f;
            }
        }
    }

    // Make room for scores (in base 2) and scales of this lane's tokens, of which the largest are given.
    DEVICE void admit(const float (&score)[N_TILES][2], const float (&scale)[N_TILES]) {
        bool is_larger = false;
        for (int n = 0; n < N_TILES; ++n) {
            is_larger |= scale[n] > WIDE * wide[n];
            for (int e = 0; e < 2; ++e) is_larger |= score[n][e] > top[n][e] + ROOM;
        }
        if (!any_lane(is_larger)) return;
        for (int n = 0; n < N_TILES; ++n) {
            wide[n] = fmaxf(wide[n], largest_of_rows(scale[n]));
            for (int e = 0; e < 2; ++e) {
                float largest = fmaxf(top[n][e], largest_of_rows(score[n][e]));
                float now = largest == minus_infinity() ? 0.0f : largest + log2_fast(wide[n]) - LIFT;
                float left = top[n][e] == minus_infinity() ? 0.0f : exp2_fast(ref[n][e] - now);
                top[n][e] = largest;
                ref[n][e] = now;
                total[n][e] *= left;
                for (int part = 0; part < Values::PARTS; ++part) spare[n][part][e] *= left;
                for (int head = 0; head < 2; ++head)
                    if (N_TILES == 1 || head == n)
                        for (int t = 0; t < V_TILES; ++t) acc[head][t][e] *= left, acc[head][t][2 + e] *= left;
            }
        }
    }

    // Make scores of tokens i + 16m + g and 8 further, of M tiles, weights; those of tokens that a column does not see are 0.
    template <bool MASKED, int M>
    DEVICE void weigh(float (&s)[N_TILES][M][4], const Rows& rows, int i, int until, const float (&scale)[N_TILES]) {
        float largest[N_TILES][2];
        for (int n = 0; n < N_TILES; ++n)
            for (int e = 0; e < 2; ++e) {
                largest[n][e] = minus_infinity();
                for (int m = 0; m < M; ++m)
                    for (int half = 0; half < 2; ++half) {
                        float& x = s[n][m][2 * half + e];
                        int token = i + 16 * m + 8 * half + lane_id() / 4;
                        if (MASKED && !(token < until && rows.sees(token, e))) x = minus_infinity();
                        largest[n][e] = fmaxf(largest[n][e], x);
                    }
                largest[n][e] *= rows.by[n][e];
            }
        admit(largest, scale);
        for (int n = 0; n < N_TILES; ++n)
            for (int m = 0; m < M; ++m)
                for (int k = 0; k < 4; ++k) {
                    s[n][m][k] = exp2_fast(s[n][m][k] * rows.by[n][k % 2] - ref[n][k % 2]);
                    total[n][k % 2] += s[n][m][k];
                }
    }

    // Read the values of a tile whose scores are given, from token i on, of which those below `until` are there.
    template <bool MASKED>
    DEVICE void read(float (&s)[N_TILES][M_TILES][4], u32 at, const Rows& rows, int i, int until, const Levels& levels, Table table) {
        int g = lane_id() / 4, j = lane_id() % 4;
        u32 codes = at + VALUES_AT;
        float z[N_TILES][Values::PARTS][M_TILES][2], widest[N_TILES];
        for (int n = 0; n < N_TILES; ++n) {
            widest[n] = 0.0f;
            for (int part = 0; part < Values::PARTS; ++part)
                for (int m = 0; m < M_TILES; ++m)
                    for (int half = 0; half < 2; ++half) {
                        int token = 16 * m + 8 * half + g;
                        float x = Values::scale(Values::scale_at(codes, N_TILES == 1 ? j / 2 : n, part, token));
                        if (MASKED && i + token >= until) x = 0.0f;  // the slot may contain NaN
                        z[n][part][m][half] = x;
                        widest[n] = fmaxf(widest[n], fabsf(x));
                    }
        }
        weigh<MASKED>(s, rows, i, until, widest);
        for (int part = 0; part < Values::PARTS; ++part) {
            u32 b[N_TILES][M_TILES][2];
            for (int n = 0; n < N_TILES; ++n)
                for (int m = 0; m < M_TILES; ++m)
                    for (int half = 0; half < 2; ++half) {
                        float x = s[n][m][2 * half] * z[n][part][m][half], y = s[n][m][2 * half + 1] * z[n][part][m][half];
                        spare[n][part][0] += x;
                        spare[n][part][1] += y;
                        b[n][m][half] = transpose(pack_f16x2(x, y));
                    }
            for (int head = 0; head < 2; ++head)
                add(head, part, codes + (head * Values::PARTS + part) * TOKENS * Values::BYTES, b[N_TILES == 1 ? 0 : head], levels, table);
        }
    }

    // Add a block of values by its weights.
    DEVICE void add(int head, int part, u32 plane, const u32 (&b)[M_TILES][2], const Levels& levels, Table table) {
        int l = lane_id();
        for (int m = 0; m < M_TILES; m += 2 / Values::WORDS) {
            // Tiles of eight tokens: of two chunks of sixteen tokens, or of one of all.
            u32 r[4];
            ldmatrix_x4(r, plane, 16 * m + (Values::WORDS == 1 ? l : l % 16), Values::WORDS == 1 ? 0 : l / 16);
            for (int k = 0; k < 2; ++k) {
                int word = Values::WORDS == 1 ? 0 : k, of = Values::WORDS == 1 ? m + k : m;
                u32 low[2 * Values::NIBBLES], high[2 * Values::NIBBLES];
                Values::template numbers<false>(r[2 * k], k < TABLED, levels, table, low);
                Values::template numbers<false>(r[2 * k + 1], k < TABLED, levels, table, high);
                for (int nibble = 0; nibble < Values::NIBBLES; ++nibble) {
                    u32 a[4] = {low[2 * nibble], low[2 * nibble + 1], high[2 * nibble], high[2 * nibble + 1]};
                    mma_f16(acc[head][part * Values::STEPS + Values::step(word, nibble)], a, b[of][0], b[of][1]);
                }
            }
        }
    }
    static DEVICE void ldmatrix_x4(u32 (&r)[4], u32 plane, int token, int chunk) {
        ldmatrix_x4_trans(r, plane + Values::chunk_at(token, chunk));
    }

    // Take from the sums what codes are too much.
    DEVICE void settle() {
        if (Values::LESS == 0.0f) return;
        for (int n = 0; n < N_TILES; ++n)
            for (int part = 0; part < Values::PARTS; ++part)
                for (int e = 0; e < 2; ++e) {
                    float less = sum_over_rows(spare[n][part][e]) * (Values::LESS * Values::UNIT);
                    spare[n][part][e] = 0.0f;
                    for (int head = 0; head < 2; ++head)
                        if (N_TILES == 1 || head == n)
                            for (int t = 0; t < Values::STEPS; ++t) {
                                float(&x)[4] = acc[head][part * Values::STEPS + t];
                                x[e] -= less * Values::over(t);
                                x[2 + e] -= less * Values::over(t);
                            }
                }
    }

    // Make sums of codes sums of numbers, as tails have them.
    DEVICE void as_numbers() {
        for (int head = 0; head < 2; ++head)
            for (int t = 0; t < V_TILES; ++t)
                for (int k = 0; k < 4; ++k) acc[head][t][k] *= 1.0f / (Values::UNIT * Values::over(t % Values::STEPS));
    }

    // Merge the sums of a block's warps, and write them as `split_kv_kernel` does. All copies must have come.
    DEVICE void merge(u16* out, float* sums, i64 b, int pair, int split, int n_splits) {
        int g = lane_id() / 4, j = lane_id() % 4, warp = warp_id();
        u32 base = shared_address(shared_memory()), parts = base + warp * PART * 4;
        u32 refs = base + WARPS * PART * 4, totals = refs + WARPS * PART_ROWS * 4;
        for (int head = 0; head < 2; ++head)
            for (int e = 0; e < 2; ++e) {
                int column = 2 * j + e, n = N_TILES == 1 ? 0 : head;
                float all = sum_over_rows(total[n][e]);
                if (N_TILES == 1 && column / 4 != head) continue;
                int row = head * COLUMNS + column % COLUMNS;
                for (int t = 0; t < V_TILES; ++t)
                    for (int k = 0; k < 2; ++k)
                        store_shared_f32(parts + (row * D_V + 16 * t + 2 * g + k) * 4, acc[head][t][2 * k + e]);
                if (g == 0) {
                    store_shared_f32(refs + (warp * PART_ROWS + row) * 4, ref[n][e]);
                    store_shared_f32(totals + (warp * PART_ROWS + row) * 4, all);
                }
            }
        sync_block();
        for (int place = 32 * warp + lane_id(); place < 2 * ROWS * D_V / 2; place += 32 * WARPS) {
            int head = place / (ROWS * D_V / 2), r = place / (D_V / 2) % ROWS, d = 2 * (place % (D_V / 2));
            int row = head * COLUMNS + r;
            float largest = minus_infinity(), whole = 0.0f, x = 0.0f, y = 0.0f;
            for (int w = 0; w < WARPS; ++w)
                if (load_shared_f32(totals + (w * PART_ROWS + row) * 4) > 0)
                    largest = fmaxf(largest, load_shared_f32(refs + (w * PART_ROWS + row) * 4));
            for (int w = 0; w < WARPS; ++w) {
                float own = load_shared_f32(totals + (w * PART_ROWS + row) * 4);
                if (!(own > 0)) continue;
                float weight = exp2_fast(load_shared_f32(refs + (w * PART_ROWS + row) * 4) - largest);
                u32x2 both = load_shared_u64(base + (w * PART + row * D_V + d) * 4);
                whole += weight * own;
                x += weight * from_bits(both.x);
                y += weight * from_bits(both.y);
            }
            bool is_some = whole > 0;
            float inverse = 1.0f / (is_some ? whole : 1.0f), sum = largest + log2_fast(whole);
            // Rows of the output are [B, H, QUERIES], those of the parts [B, H, QUERIES, splits].
            i64 to = (b * KV_HEADS + 2 * pair + head) * ROWS + r;
            if (!FINAL) to = to * n_splits + split;
            if (d == 0) sums[to] = is_some ? sum * (FINAL ? LN_2 : 1.0f) : minus_infinity();
            u32 pair_of = BRAIN ? pack_bf16x2(x * inverse, y * inverse) : pack_f16x2(x * inverse, y * inverse);
            *reinterpret_cast<u32*>(out + to * D_V + d) = pair_of;
        }
    }
};
#endif
