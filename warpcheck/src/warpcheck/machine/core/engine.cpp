// Launch of a grid, scheduling loop, and retirement of CTAs.
#include "engine.hpp"

#include "lanes.hpp"

namespace warpcheck {
namespace {

constexpr uint32_t kIdleRounds = 128;   // time-outs that waits with a limit get before a deadlock is reported
constexpr uint32_t kThreadsPerBlock = 1024;

const char* wait_name(Wait w) {
    switch (w) {
        case Wait::Converge: return "convergence";
        case Wait::Mbarrier: return "mbarrier";
        case Wait::Named: return "named barrier";
        case Wait::ClusterBarrier: return "cluster barrier";
        case Wait::TmemAlloc: return "tcgen05.alloc";
        case Wait::Registers: return "registers";
        case Wait::Poll: return "memory";
        case Wait::Warpgroup: return "warpgroup";
        default: return "";
    }
}

uint32_t whole_warpgroups(uint32_t threads) { return (threads + 127) / 128 * 128; }

bool polls(Wait w) { return w == Wait::Poll || w == Wait::TmemAlloc || w == Wait::Warpgroup || w == Wait::Registers; }

}  // namespace

Engine::Engine(const Program& program, const Config& config) : program_(program), config_(config) {
    races_.enabled = config.check_races;
    races_.by_letter = config.check_letter;
    races_.outputs = config.outputs;
    findings_.collect = config.collect;
    findings_.off = config.off;
    if (config.overlaps) races_.overlap(config.before);
    for (uint32_t i = 0; i < config.sms; ++i) {
        sms_.push_back(std::make_unique<Sm>());
        sms_.back()->id = i;
    }
    cluster_count_ = 1;
    for (int i = 0; i < 3; ++i) {
        cluster_grid_[i] = config.grid[i] / config.cluster[i];
        cluster_count_ *= cluster_grid_[i];
        cluster_size_ *= config.cluster[i];
    }
    for (const uint64_t number : config.clusters)
        if (number >= cluster_count_) throw std::invalid_argument("cluster " + std::to_string(number) + " of a grid of " + std::to_string(cluster_count_));
    if (!config.clusters.empty()) cluster_count_ = config.clusters.size();
    const uint32_t warps = (config.block[0] * config.block[1] * config.block[2] + 31) / 32;
    counters.waits.resize(program.code.size());
    counters.by_warp.assign(warps, std::vector<uint64_t>(program.code.size()));
    scheduler_ = Scheduler::make(config.schedule, config.seed, warps);
}

void Engine::start_warp(Warp& w) {
    Cta& cta = *w.cta;
    const auto& b = config_.block;
    w.regs.assign(program_.register_words + 16, 0xDEADBEEFu);
    w.valid.assign(program_.register_count, 0);
    w.in_flight.assign(program_.register_count, 0);
    if (program_.uses_wgmma) w.written_at.assign(program_.register_count, 0);
    if (program_.local_bytes) {
        w.local.assign(size_t(program_.local_bytes) * 32, 0xFF);
        w.local_valid.assign(size_t(program_.local_bytes) * 32, 0);
    }
    w.fragments.reserve(40);
    Fragment f;
    f.mask = w.lanes;
    w.fragments.push_back(f);
    w.alive = w.clock.alive = w.lanes;
    if (config_.timing) {
        records.emplace_back();
        w.timed = &records.back();
        w.timed->cta = cta.linear, w.timed->warp = w.index, w.timed->sm = cta.sm->id;
    }
    races_.start(w.clock, int32_t(cta.linear));
    Cluster& cluster = *cta.cluster;
    w.clock.domain[0] = cta.linear;
    w.clock.domain[1] = cluster.ctas.front()->linear;
    for (const PresetRegister& p : program_.presets) {
        w.valid[size_t(p.where.id)] = ~0u;
        for (uint32_t l = 0; l < 32; ++l) {
            const uint32_t t = w.index * 32 + l;
            uint64_t v = 0;
            switch (p.what) {
                case Preset::TidX: v = t % b[0]; break;
                case Preset::TidY: v = t / b[0] % b[1]; break;
                case Preset::TidZ: v = t / b[0] / b[1]; break;
                case Preset::NtidX: v = b[0]; break;
                case Preset::NtidY: v = b[1]; break;
                case Preset::NtidZ: v = b[2]; break;
                case Preset::CtaidX: v = cta.id[0]; break;
                case Preset::CtaidY: v = cta.id[1]; break;
                case Preset::CtaidZ: v = cta.id[2]; break;
                case Preset::NctaidX: v = config_.grid[0]; break;
                case Preset::NctaidY: v = config_.grid[1]; break;
                case Preset::NctaidZ: v = config_.grid[2]; break;
                case Preset::LaneId: v = l; break;
                case Preset::WarpId: v = w.index; break;
                case Preset::NwarpId: v = config_.threads_per_sm / 32; break;
                case Preset::SmId: v = cta.sm->id; break;
                case Preset::NsmId: v = config_.sms; break;
                case Preset::GridId: v = 1; break;
                case Preset::ClusteridX: v = cluster.id[0]; break;
                case Preset::ClusteridY: v = cluster.id[1]; break;
                case Preset::ClusteridZ: v = cluster.id[2]; break;
                case Preset::NclusteridX: v = cluster_grid_[0]; break;
                case Preset::NclusteridY: v = cluster_grid_[1]; break;
                case Preset::NclusteridZ: v = cluster_grid_[2]; break;
                case Preset::ClusterCtaidX: v = cta.id[0] % config_.cluster[0]; break;
                case Preset::ClusterCtaidY: v = cta.id[1] % config_.cluster[1]; break;
                case Preset::ClusterCtaidZ: v = cta.id[2] % config_.cluster[2]; break;
                case Preset::ClusterNctaidX: v = config_.cluster[0]; break;
                case Preset::ClusterNctaidY: v = config_.cluster[1]; break;
                case Preset::ClusterNctaidZ: v = config_.cluster[2]; break;
                case Preset::ClusterCtarank: v = cta.rank; break;
                case Preset::ClusterNctarank: v = cluster_size_; break;
                case Preset::IsExplicitCluster: v = config_.explicit_cluster; break;
                case Preset::LanemaskEq: v = 1u << l; break;
                case Preset::LanemaskLe: v = (2ull << l) - 1; break;
                case Preset::LanemaskLt: v = (1ull << l) - 1; break;
                case Preset::LanemaskGe: v = uint32_t(~((1ull << l) - 1)); break;
                case Preset::LanemaskGt: v = uint32_t(~((2ull << l) - 1)); break;
                case Preset::DynamicSmemSize: v = config_.dynamic_shared; break;
                case Preset::TotalSmemSize: case Preset::AggrSmemSize: v = cta.shared.size(); break;
                case Preset::SharedSymbol: v = uint64_t(cta.rank) << kRankShift | p.value; break;
                default: v = 0;
            }
            if (p.where.bits == 64) put<uint64_t>(w.regs.data() + p.where.offset, int(l), v);
            else if (p.where.bits == 1) { if (l == 0) w.regs[p.where.offset] = v ? ~0u : 0; }
            else w.regs[p.where.offset + l] = uint32_t(v);
        }
    }
}

// Registers per thread at launch. The PTX does not contain the assembler's choice. The model takes an equal share of
// the register file, as the assembler does for kernels with setmaxnreg. A CTA has the registers of whole warpgroups: those
// of warps that it lacks are in its pool.
uint32_t Engine::launch_registers(uint32_t threads) const {
    if (program_.max_registers) return program_.max_registers;
    return std::min(248u, config_.registers_per_sm / whole_warpgroups(threads) / 8 * 8);
}

// Refuses launches that the driver refuses. Afterwards one cluster fits on an empty chip.
void Engine::check_launch() const {
    for (int i = 0; i < 3; ++i)
        if (config_.grid[i] % config_.cluster[i]) fail(Check::LaunchRefused, "the grid is not a multiple of the cluster");
    if (cluster_size_ > config_.sms)
        fail(Check::LaunchRefused, "a cluster of " + std::to_string(cluster_size_) + " CTAs needs as many SMs; the chip has " + std::to_string(config_.sms));
    const uint32_t threads = config_.block[0] * config_.block[1] * config_.block[2];
    if (threads < 1 || threads > kThreadsPerBlock)
        fail(Check::LaunchRefused, "a block of " + std::to_string(threads) + " threads; the chip runs 1 to " + std::to_string(kThreadsPerBlock));
    const uint32_t shared = program_.static_shared_bytes + config_.dynamic_shared;
    if (shared > config_.shared_per_block)
        fail(Check::LaunchRefused, "a block of " + std::to_string(shared) + " bytes of shared memory (" + std::to_string(program_.static_shared_bytes) +
                                  " static, " + std::to_string(config_.dynamic_shared) + " dynamic); the chip gives a block " +
                                  std::to_string(config_.shared_per_block));
    const uint32_t rounded = (threads + 31) / 32 * 32;
    if (program_.max_registers * rounded > config_.registers_per_sm)
        fail(Check::RegisterFile, std::to_string(rounded) + " threads of " + std::to_string(program_.max_registers) +
                                         " registers at launch; the SM has " + std::to_string(config_.registers_per_sm));
}

bool Engine::place_cluster(uint64_t n) {
    const uint64_t number = cluster_number(n);
    const uint32_t threads = config_.block[0] * config_.block[1] * config_.block[2];
    const uint32_t rounded = (threads + 31) / 32 * 32;
    const uint32_t shared = kSharedReserved + program_.static_shared_bytes + config_.dynamic_shared;
    std::vector<Sm*> chosen;
    for (uint32_t r = 0; r < cluster_size_; ++r) {
        Sm* best = nullptr;
        for (auto& sm : sms_) {
            if (std::find(chosen.begin(), chosen.end(), sm.get()) != chosen.end()) continue;
            if (sm->shared_used + shared > config_.shared_per_sm || sm->threads_used + rounded > config_.threads_per_sm || sm->ctas >= config_.blocks_per_sm) continue;
            if (!best || sm->ctas < best->ctas) best = sm.get();
        }
        if (!best) return false;
        chosen.push_back(best);
    }
    auto cluster = std::make_unique<Cluster>();
    const uint64_t at[3] = {number % cluster_grid_[0], number / cluster_grid_[0] % cluster_grid_[1], number / cluster_grid_[0] / cluster_grid_[1]};
    for (int i = 0; i < 3; ++i) cluster->id[i] = uint32_t(at[i]);
    for (uint32_t r = 0; r < cluster_size_; ++r) {
        auto cta = std::make_unique<Cta>();
        const uint32_t in[3] = {r % config_.cluster[0], r / config_.cluster[0] % config_.cluster[1], r / config_.cluster[0] / config_.cluster[1]};
        for (int i = 0; i < 3; ++i) cta->id[i] = cluster->id[i] * config_.cluster[i] + in[i];
        cta->linear = (cta->id[2] * config_.grid[1] + cta->id[1]) * config_.grid[0] + cta->id[0];
        cta->rank = r;
        cta->cluster = cluster.get();
        cta->sm = chosen[r];
        cta->sm->shared_used += shared;
        cta->sm->threads_used += rounded;
        ++cta->sm->ctas;
        cta->shared.assign(shared, 0xFF);
        cta->shadow.assign(shared, 0);
        const uint32_t registers = launch_registers(rounded);
        cta->pool_registers = (whole_warpgroups(rounded) - rounded) * registers;
        for (uint32_t i = 0; i < rounded / 32; ++i) {
            auto w = std::make_unique<Warp>();
            w->cta = cta.get();
            w->index = i;
            const uint32_t lanes = std::min(32u, threads - i * 32);
            w->lanes = lanes == 32 ? ~0u : (1u << lanes) - 1;
            w->registers = registers;
            cluster->alive_lanes += lanes;
            warps_.push_back(w.get());
            cta->warps.push_back(std::move(w));
        }
        cta->alive_warps = rounded / 32;
        cluster->ctas.push_back(std::move(cta));
    }
    cluster->alive_ctas = cluster_size_;
    for (auto& cta : cluster->ctas)
        for (auto& w : cta->warps) start_warp(*w);
    clusters_.push_back(std::move(cluster));
    return true;
}

void Engine::retire(Cta& cta) {
    if (!cta.tmem_allocations.empty() && config_.check_tmem) {
        SimError error(Check::TmemMisuse, "CTA " + std::to_string(cta.linear) + " exits with " + std::to_string(cta.tmem_allocations.begin()->second) +
                                         " TMEM columns still allocated: tcgen05.dealloc is missing");
        error.place.cta = int32_t(cta.linear);
        findings_.note(std::move(error));
    }
    Cluster& cluster = *cta.cluster;
    if (--cluster.alive_ctas) return;
    drain(cta);
    for (auto& c : cluster.ctas) {
        races_.end_of_shared(*c, config_.check_leftovers);
        if (config_.check_leftovers) check_barriers_left(*c);
        if (config_.check_letter) check_register_changes(*c);
        c->sm->shared_used -= uint32_t(c->shared.size());
        c->sm->threads_used -= uint32_t(c->warps.size()) * 32;
        --c->sm->ctas;
        for (uint32_t column = 0; column < kTmemColumns; ++column)
            if (c->sm->tmem_owner[column] == c.get()) c->sm->tmem_owner[column] = nullptr, c->sm->tmem_taken[column] = false;
        for (auto& w : c->warps) {
            if (races_.enabled) races_.end(w->clock);
            warps_.erase(std::find(warps_.begin(), warps_.end(), w.get()));
        }
    }
    clusters_.erase(std::find_if(clusters_.begin(), clusters_.end(), [&](auto& c) { return c.get() == &cluster; }));
    effect();
    launch_ready_clusters();
}

bool Engine::runnable(const Warp& w) const {
    for (const Fragment& f : w.fragments)
        if (f.wait == Wait::None || (polls(f.wait) && f.poll_epoch != epoch_)) return true;
    return false;
}

void Engine::record(Warp& w, int32_t row, uint32_t count, const char* what) {
    mix(uint64_t(w.cta->linear) << 40 ^ uint64_t(w.index) << 32 ^ uint64_t(uint32_t(row)) << 8 ^ count);
    if (config_.trace) trace.push_back({time_, int32_t(w.cta->linear), int32_t(w.index), row, count, what});
}

// Records when registers were written, for the check of wgmma.fence. The assembler merges source and destination of a
// mov into one register: the copy takes the age of its source, and a constant counts as fenced.
void Engine::note_writes(Warp& w, const Instr& in) {
    const Operand* ops = program_.operands.data() + in.first;
    for (uint32_t i = 0; i < in.ndst; ++i) {
        if (ops[i].kind != Operand::Reg) continue;
        uint32_t when = w.fence_epoch;
        if (in.op == Op::mov) when = ops[1].kind == Operand::Reg ? w.written_at[size_t(ops[1].id)] : 0;
        w.written_at[size_t(ops[i].id)] = when;
    }
}

// Runs one warp for at most `quantum` instructions. Returns false if the warp has ended.
bool Engine::run_warp(Warp& w, uint32_t quantum) {
    const int32_t first_row = w.fragments.empty() ? -1 : int32_t(w.fragments.front().pc);
    uint32_t done = 0;
    const char* what = "";
    uint64_t* counts = counters.by_warp[w.index].data();
    running_ = &w;
    while (done < quantum) {
        // The fragment with the lowest program counter runs first, so that fragments meet again where control flow
        // joins.
        Fragment* f = nullptr;
        for (Fragment& g : w.fragments)
            if ((g.wait == Wait::None || (polls(g.wait) && g.poll_epoch != epoch_)) && (!f || g.pc < f->pc)) f = &g;
        if (!f) break;
        if (f->wait != Wait::None) f->wait = Wait::None;
        const uint32_t row = f->pc;
        const Instr& in = program_.code[row];
        current_ = place_of(w, *f, int32_t(row));
        ++done;
        ++time_;
        const Next next = attempt(w, *f, in);
        if (next == Next::Stay) {
            ++counters.waits[row];
            if (w.timed && f->wait == Wait::Named) w.timed->execute(row);
        } else {
            ++counts[row];
            ++executed;
            if (w.timed) w.timed->execute(row);
            if (next == Next::Advance) {
                ++f->pc;
                if (program_.uses_wgmma && in.op != Op::wgmma) note_writes(w, in);
            }
        }
        if (f->wait != Wait::None) what = wait_name(f->wait);
        if (f->mask == 0) w.fragments.erase(w.fragments.begin() + (f - w.fragments.data()));
        if (w.fragments.size() > 1) merge(w);
        if (!w.alive) {
            record(w, first_row, done, "exit");
            Cta& cta = *w.cta;
            running_ = nullptr;
            if (cta.alive_warps == 0) retire(cta);
            return false;
        }
    }
    running_ = nullptr;
    record(w, first_row, done, what);
    return true;
}

bool Engine::idle() {
    idle_rounds_ = idle_epoch_ == epoch_ ? idle_rounds_ + 1 : 0;
    idle_epoch_ = epoch_;
    if (idle_rounds_ > kIdleRounds) return false;
    bool any = false;
    for (Warp* w : warps_)
        for (Fragment& f : w->fragments) {
            if (f.wait == Wait::Mbarrier) f.timed_out = true;
            else if (f.wait != Wait::Poll) continue;
            f.wait = Wait::None;
            any = true;
        }
    return any;
}

bool Engine::step() {
    std::vector<Candidate> ready;
    for (size_t i = 0; i < warps_.size(); ++i)
        if (runnable(*warps_[i])) ready.push_back({i, warps_[i]->index});
    if (ready.empty() && pipes_.empty()) {
        if (warps_.empty()) return false;
        if (!idle() && !admit()) deadlock();
        return true;
    }
    const Turn turn = scheduler_->next(ready, pipes_.size());
    if (turn.warp != Turn::kNobody) run_warp(*warps_[turn.warp], turn.quantum);
    if (turn.pipe != Turn::kNobody) fire(turn.pipe);
    else if (turn.then_a_pipe && !pipes_.empty()) fire(time_ % pipes_.size());
    return true;
}

void Engine::run() {
    check_launch();
    launch_ready_clusters();
    if (config_.cooperative && next_cluster_ < cluster_count_)
        fail(Check::LaunchRefused, "a cooperative launch of " + std::to_string(cluster_count_ * cluster_size_) + " CTAs; at most " +
                                  std::to_string(next_cluster_ * cluster_size_) + " are resident");
    try {
        while (step()) watch();
    } catch (SimError& error) {
        annotate(error);
        if (error.check == Check::Uninitialized && races_.enabled) look_for_race();
        throw;
    } catch (UnitError& error) {
        throw named(error);
    }
}

}  // namespace warpcheck
