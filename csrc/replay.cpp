#include "replay.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

#include "mode.h"
#include "pack.h"

namespace headrace {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;
constexpr int64_t kPieceBytes = 16 << 10;  // of weights that one piece of a linear map reads, at least
constexpr int kManyRows = 8;               // of a linear map, from which on a piece of it has fewer weights
constexpr int kRowsPerPiece = 128;         // rows of a linear map whose activations stay in a core's cache meanwhile
constexpr int64_t kSerial = 8 << 10;       // numbers of a piece of whole rows; so few in all are the caller's alone

// Cosine and sine of x >= 0 in float64: x less whole quarter turns, then Taylor's series on [-pi/4, pi/4].
void turn(double x, double& cosine, double& sine) {
  const double magic = 6755399441055744.0;  // 1.5 x 2^52
  const double t = x * 0.63661977236758134 + magic;
  const double n = t - magic;
  // pi / 2 in three parts, the first two of 33 bits: their products with n are exact.
  const double r = ((x - n * 1.5707963267341256) - n * 6.0771005063039597e-11) - n * 2.0222662487959506e-21;
  const double s = r * r;
  static constexpr double kSine[] = {-7.6471637318198164e-13, 1.6059043836821613e-10, -2.5052108385441720e-08,
                                     2.7557319223985893e-06,  -1.9841269841269841e-04, 8.3333333333333332e-03,
                                     -1.6666666666666666e-01, 1.0};
  static constexpr double kCosine[] = {4.7794773323873853e-14, -1.1470745597729725e-11, 2.0876756987868099e-09,
                                       -2.7557319223985888e-07, 2.4801587301587302e-05, -1.3888888888888889e-03,
                                       4.1666666666666664e-02, -0.5, 1.0};
  double a = 0.0, b = 0.0;
  for (const double c : kSine) a = a * s + c;
  for (const double c : kCosine) b = b * s + c;
  a *= r;
  uint64_t bits;
  std::memcpy(&bits, &t, 8);
  const int quarter = static_cast<int>(bits & 3);
  cosine = quarter == 0 ? b : quarter == 1 ? -a : quarter == 2 ? -b : a;
  sine = quarter == 0 ? a : quarter == 1 ? b : quarter == 2 ? -a : -b;
}

// float32(position) x frequency is the angle.
void angles(int position, const float* frequencies, int half, float factor, float* out) {
  for (int i = 0; i < half; ++i) {
    const float angle = static_cast<float>(position) * frequencies[i];
    double cosine, sine;
    turn(static_cast<double>(angle), cosine, sine);
    out[i] = static_cast<float>(cosine) * factor;
    out[half + i] = static_cast<float>(sine) * factor;
  }
}

}  // namespace

uint8_t* reserve(int64_t bytes) {
  const int64_t size = up(bytes > 0 ? bytes : 1, kHugePage);
  void* p = mmap(nullptr, static_cast<size_t>(size + kHugePage), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  auto* raw = static_cast<uint8_t*>(p);
  auto* data = reinterpret_cast<uint8_t*>(up(reinterpret_cast<int64_t>(p), kHugePage));
  if (data > raw) munmap(raw, static_cast<size_t>(data - raw));
  const int64_t behind = raw + size + kHugePage - (data + size);
  if (behind > 0) munmap(data + size, static_cast<size_t>(behind));
#ifdef MADV_HUGEPAGE
  madvise(data, static_cast<size_t>(size), MADV_HUGEPAGE);  // a wish: without it everything works
#endif
  return data;
}

void release(uint8_t* data, int64_t bytes) {
  if (data != nullptr) munmap(data, static_cast<size_t>(up(bytes > 0 ? bytes : 1, kHugePage)));
}

Replayer::~Replayer() { release(arena_, arena_bytes_); }

void Replayer::run(const Batch& batch, const std::vector<External>& externals) {
  const Mode mode(Denormals::flushed);
  const Kept kept = threads_->keep_caller();
  place(batch, externals);
  owner_.resize(static_cast<size_t>(batch.tokens));
  for (int r = 0; r < batch.rows; ++r) {
    for (int t = batch.offsets[r]; t < batch.offsets[r + 1]; ++t) owner_[t] = r;
  }
  attended_.assign(batch.tables.size(), std::nullopt);
  for (const Prepared& region : regions_) {
    if (count(region.extent, batch) == 0) continue;
    switch (region.instructions[0].kind) {
      case Kind::linear: linears(region, batch); break;
      case Kind::attend: attend(region.instructions[0], batch); break;
      default: rows(region, batch); break;
    }
  }
  if (kernels_.rest != nullptr) kernels_.rest();  // of the caller; workers only ever run kernels
}

void Replayer::add(Region region) {
  Prepared prepared{std::move(region), {}, {}};
  if (prepared.instructions[0].kind == Kind::linear) {
    prepared.few = shares(prepared, false);
    prepared.many = shares(prepared, true);
  }
  regions_.push_back(std::move(prepared));
}

// Of a slot in this run, and of the one row more that linear maps may read.
int64_t Replayer::place_bytes(size_t slot, const Batch& batch) const {
  return up(stride_[slot] * (int64_t{count(slots_[slot].extent, batch)} + 1), 64);
}

// Where each slot begins in this run.
void Replayer::place(const Batch& batch, const std::vector<External>& externals) {
  int64_t bytes = 0;
  for (size_t s = 0; s < slots_.size(); ++s) {
    stride_[s] = slots_[s].stride;
    at_[s] = nullptr;
  }
  for (const External& e : externals) {
    at_[e.slot] = e.data;
    stride_[e.slot] = e.stride;
  }
  for (size_t s = 0; s < slots_.size(); ++s) {
    if (at_[s] == nullptr) bytes += place_bytes(s, batch);
  }
  if (bytes > arena_bytes_) {
    release(arena_, arena_bytes_);
    arena_ = nullptr;
    arena_bytes_ = 0;
    arena_ = reserve(bytes);
    arena_bytes_ = up(bytes, kHugePage);
  }
  uint8_t* next = arena_;
  for (size_t s = 0; s < slots_.size(); ++s) {
    if (at_[s] != nullptr) continue;
    at_[s] = next;
    next += place_bytes(s, batch);
  }
}

void Replayer::rows(const Region& region, const Batch& batch) {
  const int n = count(region.extent, batch);
  int64_t numbers = 0;
  for (const Instruction& i : region.instructions) numbers += i.width;
  const auto some = [&](int from, int to) {
    for (int r = from; r < to; ++r) {
      for (const Instruction& i : region.instructions) row(i, batch, r);
    }
  };
  if (numbers * n <= kSerial) return some(0, n);
  const int each = static_cast<int>(numbers > kSerial ? 1 : kSerial / numbers);
  threads_->run(ceil_div(n, each), [&](int piece) {
    const int from = piece * each;
    some(from, from + each < n ? from + each : n);
  });
}

void Replayer::row(const Instruction& i, const Batch& batch, int r) const {
  switch (i.kind) {
    case Kind::embed:
      unpack_line(i.weight, batch.token_ids[r], line(i.out, r));
      if (i.a != 1.0f) kernels_.scale(line(i.out, r), i.a, i.width, line(i.out, r));
      break;
    case Kind::select:
      std::memcpy(line(i.out, r), line(i.x, batch.wanted_tokens[r]), sizeof(float) * static_cast<size_t>(i.width));
      break;
    case Kind::to_int8: kernels_.to_int8(line(i.x, r), i.width, raw(i.out, r)); break;
    case Kind::to_bf16: kernels_.to_bf16(line(i.x, r), i.width, raw(i.out, r)); break;
    case Kind::rms_norm: kernels_.rms_norm(line(i.x, r), i.width, i.vector, i.n, i.a, i.b, line(i.out, r)); break;
    case Kind::angles: angles(batch.positions[r], i.vector, i.m, i.a, line(i.out, r)); break;
    case Kind::rotate:
      kernels_.rotate(line(i.x, r), i.width / i.n, i.n, line(i.y, r), i.m, line(i.out, r));
      break;
    case Kind::store: {
      const int position = batch.positions[r];
      const int block = batch.tables[i.group][int64_t{owner_[r]} * batch.entries[i.group] + position / kBlock];
      kernels_.store(i.pool, line(i.x, r), line(i.y, r), block, position % kBlock);
      break;
    }
    case Kind::gated: kernels_.gated(line(i.x, r), line(i.y, r), i.width, i.activation, line(i.out, r)); break;
    case Kind::add: kernels_.add(line(i.x, r), line(i.y, r), i.width, line(i.out, r)); break;
    case Kind::softcap: kernels_.softcap(line(i.x, r), i.a, i.width, line(i.out, r)); break;
    case Kind::linear:
    case Kind::attend: break;
  }
}

// In order of threads, and for each its share of every map: so it meets the same weights in every step, those that it
// packed and that lie on its node.
std::vector<Share> Replayer::shares(const Region& region, bool many) const {
  const int64_t threads = threads_->count();
  std::vector<Share> out;
  for (int64_t thread = 0; thread < threads; ++thread) {
    for (size_t map = 0; map < region.instructions.size(); ++map) {
      const Weight& w = region.instructions[map].weight;
      const int64_t bytes = w.panel_bytes() * (many ? 4 : 1);
      int64_t panels = bytes >= kPieceBytes ? 1 : kPieceBytes / bytes;
      if (many && panels < kernels_.panels) panels = kernels_.panels;
      const int64_t pieces = ceil_div(w.panels(), panels);
      for (int64_t piece = pieces * thread / threads; piece < pieces * (thread + 1) / threads; ++piece) {
        const int64_t begin = piece * panels, end = begin + panels;
        out.push_back({static_cast<int>(map), static_cast<int>(begin), static_cast<int>(end < w.panels() ? end : w.panels())});
      }
    }
  }
  return out;
}

void Replayer::linears(const Prepared& region, const Batch& batch) {
  const int n = count(region.extent, batch);
  std::vector<LinearTask> tasks;
  tasks.reserve(region.instructions.size());
  for (const Instruction& i : region.instructions) {
    const uint8_t* x = raw(i.x, 0);
    const bool own = x >= arena_ && x < arena_ + arena_bytes_;
    tasks.push_back({i.weight, i.vector, x, stride_[i.x], own, line(i.out, 0), stride_[i.out] / 4});
  }
  const std::vector<Share>& shares = n < kManyRows ? region.few : region.many;
  const int pieces = static_cast<int>(shares.size());
  threads_->run(pieces * ceil_div(n, kRowsPerPiece), [&](int piece) {
    const int from = piece / pieces * kRowsPerPiece, to = from + kRowsPerPiece < n ? from + kRowsPerPiece : n;
    const Share& share = shares[static_cast<size_t>(piece % pieces)];
    const LinearTask& task = tasks[static_cast<size_t>(share.map)];
    kernels_.linear[static_cast<int>(task.weight.kind)](task, share.begin, share.end, from, to);
  });
}

// Tiles of lines, so that each thread has some; where there are too few lines for that, the segments of long rows apart.
Replayer::Attended Replayer::share_out(const AttendTask& task, int group, const Batch& batch) const {
  const int kv_heads = task.pool.kv_heads, lines_of_token = task.heads / kv_heads, threads = threads_->count();
  Attended out;
  std::vector<int> lines;
  int64_t work = 0;  // lines x segments
  for (int r = 0; r < batch.rows; ++r) {
    const int first = batch.offsets[r], n = (batch.offsets[r + 1] - first) * lines_of_token;
    if (n == 0) continue;
    out.spans.push_back({first, batch.positions[first], batch.tables[group] + int64_t{r} * batch.entries[group]});
    lines.push_back(n);
    work += int64_t{n} * Seen(task, out.spans.back(), 0, n).segments();
  }
  const int64_t share = work * kv_heads / (2 * threads);
  const int most = static_cast<int>(share < 1 ? 1 : share < kTile ? share : kTile);
  for (size_t s = 0; s < lines.size(); ++s) {
    for (int at = 0; at < lines[s]; at += most) {
      out.tiles.push_back({static_cast<int>(s), at, at + most < lines[s] ? at + most : lines[s], 0, 0, 0});
    }
  }
  const bool apart = static_cast<int64_t>(out.tiles.size()) * kv_heads < 4 * threads;
  for (size_t i = 0; i < out.tiles.size(); ++i) {
    Tile& t = out.tiles[i];
    const Seen seen(task, out.spans[static_cast<size_t>(t.span)], t.from, t.to);
    t.first_segment = seen.first_segment();
    t.segments = apart && seen.segments() > 1 ? seen.segments() : 0;
    t.sums = out.sums;
    out.sums += int64_t{t.segments} * (t.to - t.from) * sums_of_line(task.pool.dim);
    for (int segment = 0; segment < (t.segments > 0 ? t.segments : 1); ++segment) {
      out.pieces.emplace_back(static_cast<int>(i), segment);
    }
  }
  return out;
}

void Replayer::attend(const Instruction& i, const Batch& batch) {
  const AttendTask task{i.pool, line(i.x, 0), stride_[i.x] / 4, line(i.out, 0), stride_[i.out] / 4, i.heads,
                        i.a, i.b, i.window};
  std::optional<Attended>& shared = attended_[static_cast<size_t>(i.group)];
  if (!shared) shared = share_out(task, i.group, batch);
  const Attended& a = *shared;
  const int kv_heads = task.pool.kv_heads;
  if (static_cast<int64_t>(sums_.size()) < a.sums * kv_heads) sums_.resize(static_cast<size_t>(a.sums * kv_heads));
  const auto sums = [&](const Tile& t, int kv_head) { return sums_.data() + kv_head * a.sums + t.sums; };
  threads_->run(static_cast<int>(a.pieces.size()) * kv_heads, [&](int piece) {
    const auto [number, segment] = a.pieces[static_cast<size_t>(piece / kv_heads)];
    const Tile& t = a.tiles[static_cast<size_t>(number)];
    const Span& span = a.spans[static_cast<size_t>(t.span)];
    const int kv_head = piece % kv_heads;
    if (t.segments == 0) return kernels_.attend(task, span, kv_head, t.from, t.to);
    float* own = sums(t, kv_head) + int64_t{segment} * (t.to - t.from) * sums_of_line(task.pool.dim);
    kernels_.attend_segment(task, span, kv_head, t.from, t.to, t.first_segment + segment, own);
  });
  if (a.sums == 0) return;
  threads_->run(static_cast<int>(a.tiles.size()) * kv_heads, [&](int piece) {
    const Tile& t = a.tiles[static_cast<size_t>(piece / kv_heads)];
    if (t.segments == 0) return;
    const int kv_head = piece % kv_heads;
    kernels_.attend_merged(task, a.spans[static_cast<size_t>(t.span)], kv_head, t.from, t.to, t.segments, sums(t, kv_head));
  });
}

}  // namespace headrace
