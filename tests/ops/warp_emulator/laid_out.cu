// A block's queries of both streams as latent_queries.cuh lays them out, for the test of that. Macros: those of decode_latent.cu.
#include "latent_queries.cuh"

using Sem = Stream<SEM_KIND, SEM_D>;
using Geo = Stream<GEO_KIND, GEO_D>;

// out [2 bytes times the queries' numbers]: what lies in shared memory; unit [1]: the power of two of the largest.
extern "C" __global__ void laid_out(u32* out, float* unit, const u16* q_sem, const u16* q_geo, int head, int query, int geo_head,
                                    int geo_query, int first) {
    constexpr int AT = 128, GEO_AT = Sem::STEPS * STEP_BYTES, BYTES = GEO_AT + Geo::STEPS * STEP_BYTES;
    u32 shared = shared_address(shared_memory());
    int warp = warp_id();
    Part<Sem, SEM_KIND> sem;
    Part<Geo, GEO_KIND> geo;
    sem.load(q_sem, head, query, first, warp);
    geo.load(q_geo, geo_head, geo_query, first, warp);
    float found = unit_of_block(geo.largest(sem.largest(0)), shared, warp);
    sem.store(shared + AT, LARGEST / found, warp);
    geo.store(shared + AT + GEO_AT, LARGEST / found, warp);
    sync_block();
    for (int i = 32 * warp + lane_id(); i < BYTES / 4; i += 32 * WARPS) out[i] = load_shared_u32(shared + AT + 4 * i);
    if (warp == 0 && lane_id() == 0) unit[0] = found;
}
