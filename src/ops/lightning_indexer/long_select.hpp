// lightning_indexer on GPUs: selection for rows of more than 262,144 keys, in two rounds of the same kernels.
//
// Round 1   each part of 131,072 keys of a row is a row of its own: its topk best keys are candidates
// Round 2   the candidates of a row are a row: its topk best keys are selected
//
// Every selected key is among the best of its part. Candidates are in ascending order of key, so ties go to the smaller
// key as in one round. A part with fewer than topk keys ends with candidates of index -1 and absent_score(), which
// sorts below all others.
#pragma once

#include "ops/lightning_indexer/score_task.hpp"
#include "ops/lightning_indexer/select.hpp"
#include "runtime/workspace.hpp"

namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET {

enum class Round { only, parts, candidates };

// Base: the parameters of one round.
template <class Base>
struct RoundParams : Base {
  Round round;
  int parts;  // of a query
  int* candidates;
  float* candidate_scores;  // [queries of a launch, parts, topk]
};

// The row of one round, of a part, or of candidates.
template <class Row>
struct RoundRow : Row {
  const int* candidates = nullptr;

  [[nodiscard]] HOPWELL_DEVICE bool exists(int key) const { return candidates[key] >= 0; }
  [[nodiscard]] HOPWELL_DEVICE int index(int key) const { return candidates ? candidates[key] : Row::index(key); }
};

HOPWELL_DEVICE void forget_length(QueryRow& /*row*/) {}  // has an overload for rows of paged_lightning_indexer

// at: a query, or a part of a query. A query that sees at most topk keys has no candidates, and round 2 writes its
// keys.
template <class Base>
HOPWELL_DEVICE auto row_of(const RoundParams<Base>& p, int at) {
  const bool is_part = p.round == Round::parts;
  const int query = is_part ? at / p.parts : at;
  auto of_query = row_of(static_cast<const Base&>(p), query);
  RoundRow<decltype(of_query)> row{of_query};
  const bool is_long = row.visible > p.topk;
  if (is_part) {
    const int first = at % p.parts * kKeysOfPart, left = is_long && row.visible > first ? row.visible - first : 0;
    row.scores += first, row.first_key += first, row.visible = left < kKeysOfPart ? left : kKeysOfPart;
    row.indices = p.candidates + int64_t{at} * p.topk, row.top_scores = p.candidate_scores + int64_t{at} * p.topk;
    row.past_last = absent_score();
    forget_length(row);
  } else if (p.round == Round::candidates && is_long) {
    const int64_t first = int64_t{query} * p.parts * p.topk;
    const int of_last = row.visible % kKeysOfPart;  // the parts after it have no visible keys
    row.scores = p.candidate_scores + first, row.candidates = p.candidates + first;
    row.visible = row.visible / kKeysOfPart * p.topk + (of_last < p.topk ? of_last : p.topk);
  }
  return row;
}

template <class Base, class Row>
HOPWELL_DEVICE void write_visible(const RoundParams<Base>& p, int* of_warp, const RoundRow<Row>& row,
                                  const RowCtas& ctas = {}) {
  if (!row.candidates) return write_visible(static_cast<const Base&>(p), of_warp, static_cast<const Row&>(row), ctas);
  if (ctas.rank == 0) note_count(p, row, write_existing(p, of_warp, row));
}

// Selects for `count` queries by select(problem, number of rows, params). `params`: see launch_select.
template <class Select, class ParamsOf>
void select_in_rounds(const Problem& problem, const Plan& plan, void* workspace, std::int64_t count, ParamsOf params,
                      Select select) {
  const auto round = [&](Round kind, std::int64_t keys, std::int64_t rows) {
    Problem of_round = problem;
    of_round.s_kv = keys;
    select(of_round, rows, [&](const SelectPlan& of) {
      return RoundParams<decltype(params(of))>{params(of), kind, plan.parts,
                                               runtime::at_offset<int>(workspace, plan.candidates),
                                               runtime::at_offset<float>(workspace, plan.candidate_scores)};
    });
  };
  if (plan.parts == 1) return round(Round::only, problem.s_kv, count);
  round(Round::parts, kKeysOfPart, count * plan.parts);
  round(Round::candidates, plan.parts * problem.topk, count);
}

}  // namespace hopwell::ops::lightning_indexer::HOPWELL_TARGET
