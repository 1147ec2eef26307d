//! Which consecutive layers form a stage.
//!
//! A pipeline runs at the pace of its heaviest stage, so [`balanced`] makes the heaviest part as light as it can be
//! and nothing else comes before that. (Making the difference between the heaviest and the lightest part small is
//! another aim: it may accept a heavier bottleneck.) Partitions with the same bottleneck are compared by the bytes
//! that cross their cuts, then by the sum of the squares of their parts, then the earlier cut wins, from the last cut
//! to the first. Weights that are whole numbers in some unit, of which the sum has at most 53 bits, are compared
//! exactly.
//!
//! A partition into `k` parts is given by `k + 1` boundaries: part `i` holds the layers `boundaries[i]` up to, but
//! without, `boundaries[i + 1]`. No part is ever empty.

use crate::error::{PlanError, Result};

/// More parts than any pipeline has stages.
const MAX_PARTS: usize = 1 << 24;

/// The most layers times parts whose ties are broken: a quarter of a million layers on a thousand stages.
const MAX_WORK: usize = 1 << 28;

/// Cuts layers into `num_parts` parts whose largest weight is minimal.
///
/// `weights` are parameters, floating-point operations or measured times: finite and at least 0. The weight of a part
/// is their sum from left to right. `cut_nbytes[i]` are the bytes that cross a cut between the layers `i` and `i + 1`,
/// where they matter.
///
/// The bottleneck is found by bisection over all doubles with a greedy test, the ties by dynamic programming whose
/// rows are divided and conquered (Galil and Park 1992, "Dynamic programming with convexity, concavity and sparsity",
/// section 3): the cost of a part is a square, so the best cuts move one way only.
///
/// # Errors
/// [`PlanError::TooFewLayers`], [`PlanError::BadLayer`], [`PlanError::BadPartition`], [`PlanError::OutOfRange`].
pub fn balanced(weights: &[f64], num_parts: usize, cut_nbytes: Option<&[u64]>) -> Result<Vec<usize>> {
    balanced_unless(weights, num_parts, cut_nbytes, &|| false)
}

/// [`balanced`], which asks now and then whether to give up.
///
/// # Errors
/// As [`balanced`], and [`PlanError::Interrupted`] if it is to give up.
pub fn balanced_unless(
    weights: &[f64],
    num_parts: usize,
    cut_nbytes: Option<&[u64]>,
    interrupted: &dyn Fn() -> bool,
) -> Result<Vec<usize>> {
    check_num_parts(weights.len(), num_parts)?;
    if weights.len().saturating_mul(num_parts) > MAX_WORK {
        let value = i128::try_from(weights.len().saturating_mul(num_parts)).unwrap_or(i128::MAX);
        return Err(PlanError::OutOfRange { what: "number of layers * num_parts", value, expected: "at most 2^28" });
    }
    check_weights(weights)?;
    if let Some(nbytes) = cut_nbytes
        && nbytes.len() + 1 != weights.len()
    {
        let (cuts, layers) = (weights.len() - 1, weights.len());
        let reason = format!(
            "cut_nbytes has {} entries, but {layers} layers have {cuts} places between them; give one entry for each",
            nbytes.len()
        );
        return Err(PlanError::BadPartition { reason });
    }
    let bottleneck = smallest_bottleneck(weights, num_parts);
    Ties::new(weights, bottleneck, cut_nbytes, interrupted)?.solve(num_parts, interrupted)
}

/// Cuts layers into `num_parts` parts whose lengths differ by at most one; the longer ones stand at the end, because
/// the first ranks of a pipeline hold the most activations.
///
/// # Errors
/// [`PlanError::TooFewLayers`] and [`PlanError::OutOfRange`].
pub fn uniform(num_layers: usize, num_parts: usize) -> Result<Vec<usize>> {
    check_num_parts(num_layers, num_parts)?;
    let (length, longer) = (num_layers / num_parts, num_layers % num_parts);
    let shorter = num_parts - longer;
    Ok((0..=num_parts).map(|part| part * length + part.saturating_sub(shorter)).collect())
}

/// Spreads the marked layers evenly: [`balanced`] where a marked layer weighs 1 and any other nothing.
///
/// # Errors
/// [`PlanError::BadPartition`] if no layer is marked, and those of [`balanced`].
pub fn by_marks(marked: &[bool], num_parts: usize, cut_nbytes: Option<&[u64]>) -> Result<Vec<usize>> {
    by_marks_unless(marked, num_parts, cut_nbytes, &|| false)
}

/// [`by_marks`], which asks now and then whether to give up.
///
/// # Errors
/// As [`by_marks`], and [`PlanError::Interrupted`] if it is to give up.
pub fn by_marks_unless(
    marked: &[bool],
    num_parts: usize,
    cut_nbytes: Option<&[u64]>,
    interrupted: &dyn Fn() -> bool,
) -> Result<Vec<usize>> {
    check_num_parts(marked.len(), num_parts)?;
    if !marked.contains(&true) {
        let reason = format!("none of the {} layers is marked, so there is nothing to spread over parts", marked.len());
        return Err(PlanError::BadPartition { reason });
    }
    let weights: Vec<f64> = marked.iter().map(|&mark| f64::from(u8::from(mark))).collect();
    balanced_unless(&weights, num_parts, cut_nbytes, interrupted)
}

/// Checks boundaries that someone chose by hand: from 0 to `num_layers`, each beyond the one before.
///
/// # Errors
/// [`PlanError::BadPartition`] naming the first boundary that is wrong.
pub fn manual(boundaries: Vec<usize>, num_layers: usize) -> Result<Vec<usize>> {
    let bad = |reason: String| Err(PlanError::BadPartition { reason });
    if boundaries.len() < 2 {
        return bad(format!("{} boundaries make no part; give at least 0 and {num_layers}", boundaries.len()));
    }
    if boundaries[0] != 0 {
        return bad(format!("boundary 0 is {}: the first part starts at layer 0", boundaries[0]));
    }
    for (index, pair) in boundaries.windows(2).enumerate() {
        if pair[1] <= pair[0] {
            let (part, position) = (index, index + 1);
            return bad(format!(
                "boundary {position} is {} and the one before it {}, so part {part} is empty; boundaries must grow",
                pair[1], pair[0]
            ));
        }
    }
    match boundaries.last() {
        Some(&last) if last != num_layers => {
            let position = boundaries.len() - 1;
            bad(format!("boundary {position} is {last}: the last part must end with the last layer, at {num_layers}"))
        }
        _ => Ok(boundaries),
    }
}

fn check_num_parts(num_layers: usize, num_parts: usize) -> Result<()> {
    if num_parts == 0 {
        return Err(PlanError::OutOfRange { what: "num_parts", value: 0, expected: "at least 1" });
    }
    if num_parts > MAX_PARTS {
        let value = i128::try_from(num_parts).unwrap_or(i128::MAX);
        return Err(PlanError::OutOfRange { what: "num_parts", value, expected: "at most 2^24" });
    }
    if num_layers < num_parts {
        return Err(PlanError::TooFewLayers { num_layers, num_parts });
    }
    Ok(())
}

fn check_weights(weights: &[f64]) -> Result<()> {
    let bad = weights.iter().position(|weight| !weight.is_finite() || *weight < 0.0);
    if let Some(layer) = bad {
        let reason = format!("its weight is {}: expected a finite number of at least 0", weights[layer]);
        return Err(PlanError::BadLayer { layer, reason });
    }
    if !weights.iter().sum::<f64>().is_finite() {
        let reason = "the weights add up to more than a double can hold; use a larger unit".to_owned();
        return Err(PlanError::BadPartition { reason });
    }
    Ok(())
}

/// The smallest double under which the layers fit into `num_parts` parts.
///
/// Doubles that are not negative stand in the order of their bits. Adding from left to right is monotone in doubles
/// too - a part without its first or last layer never weighs more - so filling each part as far as it goes is best.
fn smallest_bottleneck(weights: &[f64], num_parts: usize) -> f64 {
    let total: f64 = weights.iter().sum();
    let (mut below, mut fits) = (0_u64, (total + 0.0).to_bits());
    while below < fits {
        let middle = below + (fits - below) / 2;
        if num_filled(weights, f64::from_bits(middle)) <= num_parts {
            fits = middle;
        } else {
            below = middle + 1;
        }
    }
    f64::from_bits(fits)
}

/// How many parts there are when each is filled up to `limit`; more than there are layers if one is heavier than that.
fn num_filled(weights: &[f64], limit: f64) -> usize {
    let (mut parts, mut filled) = (1, 0.0);
    for &weight in weights {
        if weight > limit {
            return usize::MAX;
        }
        filled += weight;
        if filled > limit {
            parts += 1;
            filled = weight;
        }
    }
    parts
}

/// What is compared between partitions of the same bottleneck: bytes cut first, then the squares of the parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Cost {
    cut_nbytes: u128,
    /// In units of [`Prefix`]; at most 2^106.
    squares: u128,
}

/// The search among the partitions none of whose parts exceeds the bottleneck.
struct Ties<'a> {
    cut_nbytes: Option<&'a [u64]>,
    prefix: Prefix,
    /// `first[j]` is the earliest start of a part that ends before layer `j`.
    first: Vec<usize>,
}

/// The best partitions into one number of parts of the layers before each `end`, for `end` from `start` on.
struct Row {
    start: usize,
    costs: Vec<Cost>,
    /// Where the last part of each begins.
    cuts: Vec<u32>,
}

impl Row {
    fn end(&self) -> usize {
        self.start + self.costs.len()
    }
}

impl<'a> Ties<'a> {
    fn new(
        weights: &[f64],
        bottleneck: f64,
        cut_nbytes: Option<&'a [u64]>,
        interrupted: &dyn Fn() -> bool,
    ) -> Result<Self> {
        let prefix = Prefix::new(weights);
        let first = earliest_starts(weights, &prefix, bottleneck, interrupted)?;
        Ok(Self { cut_nbytes, prefix, first })
    }

    fn solve(&self, num_parts: usize, interrupted: &dyn Fn() -> bool) -> Result<Vec<usize>> {
        let num_layers = self.first.len() - 1;
        let mut row = Row { start: 0, costs: vec![Cost { cut_nbytes: 0, squares: 0 }], cuts: vec![0] };
        // Of the rows before, only where they cut is needed.
        let mut cuts: Vec<(usize, Vec<u32>)> = Vec::with_capacity(num_parts);
        for _ in 0..num_parts {
            if interrupted() {
                return Err(PlanError::Interrupted);
            }
            row = self.next_row(&row, num_layers);
            cuts.push((row.start, std::mem::take(&mut row.cuts)));
        }
        let mut boundaries = vec![num_layers];
        for (start, row) in cuts.iter().rev() {
            let end = boundaries[boundaries.len() - 1];
            boundaries.push(row[end - start] as usize);
        }
        boundaries.reverse();
        Ok(boundaries)
    }

    /// One part more. The ends that can be reached are consecutive: whatever fits into fewer parts can be cut again.
    fn next_row(&self, before: &Row, num_layers: usize) -> Row {
        let start = before.start + 1;
        let end = (start..=num_layers).take_while(|&end| self.first[end] < before.end()).count() + start;
        let unknown = Cost { cut_nbytes: u128::MAX, squares: u128::MAX };
        let mut row = Row { start, costs: vec![unknown; end - start], cuts: vec![0; end - start] };
        self.fill(before, &mut row, (start, end), (0, num_layers));
        row
    }

    /// Fills the ends in `[from, to)`, whose best cuts lie in `[low, high]`.
    fn fill(&self, before: &Row, row: &mut Row, (from, to): (usize, usize), (low, high): (usize, usize)) {
        if from >= to {
            return;
        }
        let end = from + (to - from) / 2;
        let earliest = low.max(self.first[end]).max(before.start);
        let latest = high.min(end - 1).min(before.end() - 1);
        let mut best = (before.costs[earliest - before.start], earliest);
        best.0 = self.with_part(best.0, earliest, end);
        for cut in earliest + 1..=latest {
            let cost = self.with_part(before.costs[cut - before.start], cut, end);
            if cost < best.0 {
                best = (cost, cut);
            }
        }
        row.costs[end - row.start] = best.0;
        row.cuts[end - row.start] = u32::try_from(best.1).unwrap_or(u32::MAX); // At most MAX_WORK layers.
        self.fill(before, row, (from, end), (low, best.1));
        self.fill(before, row, (end + 1, to), (best.1, high));
    }

    /// The cost with one part more, which begins at `cut` and ends before `end`.
    fn with_part(&self, cost: Cost, cut: usize, end: usize) -> Cost {
        let weight = u128::from(self.prefix.between(cut, end));
        let crossing = cut.checked_sub(1).and_then(|place| Some(self.cut_nbytes?[place])).unwrap_or(0);
        Cost { cut_nbytes: cost.cut_nbytes + u128::from(crossing), squares: cost.squares + weight * weight }
    }
}

/// The weights of the layers before each place as whole numbers, in a unit that is a power of two: the total has 53
/// bits. Powers of two change no digit, so weights that are whole numbers of the caller's unit stay exact, and equal
/// squares stay equal.
struct Prefix {
    sums: Vec<u64>,
    /// The unit is one part of this many; as two factors, because one double may not hold it.
    scale: [f64; 2],
    /// Whether no sum is rounded.
    exact: bool,
}

impl Prefix {
    fn new(weights: &[f64]) -> Self {
        let total: f64 = weights.iter().sum();
        let scale = scale_to_53_bits(total);
        let scaled = |value: f64| value * scale[0] * scale[1];
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "from 0 to 2^53")]
        let whole = |value: f64| scaled(value).round() as u64;
        let mut sum = 0.0;
        let before = weights.iter().map(|weight| {
            sum += weight;
            whole(sum)
        });
        let sums = std::iter::once(0).chain(before).collect();
        // Whole numbers whose rounded sum is below 2^53 have been added without any rounding, whichever came first.
        let is_whole = |weight: f64| scaled(weight).fract() == 0.0 && (scaled(weight) == 0.0) == (weight == 0.0);
        let exact = weights.iter().all(|&weight| is_whole(weight));
        Self { sums, scale, exact }
    }

    /// The weight of the layers from `start` up to, but without, `end`.
    fn between(&self, start: usize, end: usize) -> u64 {
        self.sums[end] - self.sums[start]
    }

    /// Whether the layers from `start` up to, but without, `end` weigh at most `limit`, added from left to right:
    /// where the prefixes leave a doubt, `added` gives that sum.
    fn fits(&self, (start, end): (usize, usize), limit: f64, added: impl FnOnce() -> f64) -> bool {
        #[expect(clippy::cast_precision_loss, reason = "at most 2^53")]
        let (sum, count) = (self.between(start, end) as f64, self.sums.len() as f64);
        let limit_in_units = limit * self.scale[0] * self.scale[1];
        // Each of the additions behind both sums is off by at most half a unit, and so is each rounding.
        let sure = self.exact || (sum - limit_in_units).abs() > 4.0 * count;
        if sure { sum <= limit_in_units } else { added() <= limit }
    }
}

/// 2^53.
const TWO_TO_53: f64 = 9_007_199_254_740_992.0;

/// A power of two, as two factors, that brings a total to at least 2^52 and below 2^53; 1 for no total.
fn scale_to_53_bits(total: f64) -> [f64; 2] {
    if total == 0.0 {
        return [1.0; 2];
    }
    let (mut scale, mut scaled) = ([1.0, 1.0], total);
    let step = |factor: f64, scale: &mut [f64; 2], scaled: &mut f64| {
        let larger = usize::from(scale[0] * factor > 1e300 || scale[0] * factor < 1e-300);
        scale[larger] *= factor;
        *scaled *= factor;
    };
    while scaled < TWO_TO_53 / 2.0 {
        step(2.0, &mut scale, &mut scaled);
    }
    while scaled >= TWO_TO_53 {
        step(0.5, &mut scale, &mut scaled);
    }
    scale
}

/// For each end, the earliest start of a part that does not exceed `limit`. Both grow together.
fn earliest_starts(weights: &[f64], prefix: &Prefix, limit: f64, interrupted: &dyn Fn() -> bool) -> Result<Vec<usize>> {
    let mut first = vec![0; weights.len() + 1];
    let mut end = 0;
    // Where the equal weights from `start` on end, and the last sum of so many of them: equal layers are added once.
    let (mut run_end, mut known) = (0, (0, 0.0));
    for start in 0..weights.len() {
        if start.is_multiple_of(1024) && interrupted() {
            return Err(PlanError::Interrupted);
        }
        if start == run_end {
            run_end +=
                weights[start..].iter().take_while(|weight| weight.to_bits() == weights[start].to_bits()).count();
            known = (0, 0.0);
        }
        let mut added = |end: usize| {
            if end > run_end || known.0 != end - start {
                known = (if end > run_end { 0 } else { end - start }, weights[start..end].iter().sum());
            }
            known.1
        };
        while end < weights.len() && prefix.fits((start, end + 1), limit, || added(end + 1)) {
            end += 1;
            first[end] = start;
        }
    }
    Ok(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bottleneck_comes_before_the_difference() {
        // Parts of 7, 3 and 3 differ less, but the pipeline would run at the pace of 7.
        assert_eq!(balanced(&[1.0, 6.0, 3.0, 3.0], 3, None), Ok(vec![0, 1, 2, 4]));
    }

    #[test]
    fn behind_a_heavy_layer_the_rest_is_balanced() {
        assert_eq!(balanced(&[9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], 3, None), Ok(vec![0, 1, 4, 7]));
    }

    #[test]
    fn bytes_break_ties_and_only_ties() {
        let even = [1.0; 5];
        assert_eq!(balanced(&even, 2, Some(&[0, 9, 1, 0])), Ok(vec![0, 3, 5]));
        assert_eq!(balanced(&even, 2, Some(&[0, 1, 9, 0])), Ok(vec![0, 2, 5]));
    }

    #[test]
    fn uniform_parts_grow_to_the_end() {
        assert_eq!(uniform(7, 4), Ok(vec![0, 1, 3, 5, 7]));
        assert_eq!(uniform(30, 4), Ok(vec![0, 7, 14, 22, 30]));
    }

    #[test]
    fn of_equal_squares_the_earlier_cut_wins() {
        for unit in [1.0, 0.125, 1e9, 3e-300, 5e-324] {
            let weights = [5.0, 4.0, 4.0, 0.0, 4.0, 5.0].map(|weight| weight * unit);
            assert_eq!(balanced(&weights, 2, None), Ok(vec![0, 2, 6]), "in units of {unit}");
        }
    }

    #[test]
    fn starts_are_those_of_sums_from_left_to_right() {
        let given = |weight: fn(usize) -> f64| std::array::from_fn::<f64, 40, _>(weight);
        let repeated = given(|layer| [0.1, 0.2, 0.3][layer % 3]);
        for weights in [[0.1; 40], [0.7; 40], [3.0; 40], repeated, given(|layer| [0.1, 0.3, 0.1][layer / 14])] {
            for count in 3..40 {
                let limit = weights[..count].iter().sum::<f64>();
                let found = earliest_starts(&weights, &Prefix::new(&weights), limit, &|| false).unwrap();
                let fits = |start: usize, end: usize| weights[start..end].iter().sum::<f64>() <= limit;
                let expected = (1..=40).map(|end| (0..end).find(|&start| fits(start, end)).unwrap());
                assert_eq!(found[1..], expected.collect::<Vec<usize>>());
            }
        }
    }

    #[test]
    fn long_parts_are_no_trouble() {
        for weight in [1.0, 0.1] {
            let found = balanced(&vec![weight; 250_000], 8, None).unwrap();
            assert!(found.iter().enumerate().all(|(part, &start)| start == part * 31_250), "{found:?}");
        }
    }

    #[test]
    fn zeros_and_huge_ratios() {
        assert_eq!(balanced(&[0.0; 4], 4, None), Ok(vec![0, 1, 2, 3, 4]));
        assert_eq!(balanced(&[1e-300, 1e300, 0.0, 5e-324], 2, None).unwrap().len(), 3);
    }
}
