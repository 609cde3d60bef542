"""The instructions of PTX ISA 9.1, one a line, with samples of their forms: section, name, forms between semicolons.

In a form P, H, R, D, Q are registers of 1, 16, 32, 64 and 128 bits, R2, R4, D2, H8 and so on vectors of them; `[a|b]`
stands for each of its alternatives in turn (an address is written with round brackets), S is an address in shared
memory and M one in tensor memory.
"""

from __future__ import annotations

TABLE = """
9.7.1.1 add: add.[u16|s16] H,H,H; add[.|.sat.]s32 R,R,R; add.u32 R,R,R; add.[u64|s64] D,D,D; add.[u16x2|s16x2] R,R,R
9.7.1.2 sub: sub.[u16|s16] H,H,H; sub[.|.sat.]s32 R,R,R; sub.u32 R,R,R; sub.[u64|s64] D,D,D
9.7.1.3 mul: mul.[lo|hi].[u16|s16] H,H,H; mul.[lo|hi].[u32|s32] R,R,R; mul.[lo|hi].[u64|s64] D,D,D; mul.wide.[u16|s16] R,H,H; mul.wide.[u32|s32] D,R,R
9.7.1.4 mad: mad.[lo|hi].[u16|s16] H,H,H,H; mad.[lo|hi].[u32|s32] R,R,R,R; mad.[lo|hi].[u64|s64] D,D,D,D; mad.wide.[u16|s16] R,H,H,R; mad.wide.[u32|s32] D,R,R,D; mad.hi.sat.s32 R,R,R,R
9.7.1.5 mul24: mul24.[lo|hi].[u32|s32] R,R,R
9.7.1.6 mad24: mad24.[lo|hi].[u32|s32] R,R,R,R; mad24.hi.sat.s32 R,R,R,R
9.7.1.7 sad: sad.[u16|s16] H,H,H,H; sad.[u32|s32] R,R,R,R; sad.[u64|s64] D,D,D,D
9.7.1.8 div: div.[u16|s16] H,H,H; div.[u32|s32] R,R,R; div.[u64|s64] D,D,D
9.7.1.9 rem: rem.[u16|s16] H,H,H; rem.[u32|s32] R,R,R; rem.[u64|s64] D,D,D
9.7.1.10 abs: abs.s16 H,H; abs.s32 R,R; abs.s64 D,D
9.7.1.11 neg: neg.s16 H,H; neg.s32 R,R; neg.s64 D,D
9.7.1.12 min: min.[u16|s16] H,H,H; min.[u32|s32|u16x2|s16x2|relu.s16x2|relu.s32] R,R,R; min.[u64|s64] D,D,D
9.7.1.13 max: max.[u16|s16] H,H,H; max.[u32|s32|u16x2|s16x2|relu.s16x2|relu.s32] R,R,R; max.[u64|s64] D,D,D
9.7.1.14 popc: popc.b32 R,R; popc.b64 R,D
9.7.1.15 clz: clz.b32 R,R; clz.b64 R,D
9.7.1.16 bfind: bfind[.|.shiftamt.][u32|s32] R,R; bfind[.|.shiftamt.][u64|s64] R,D
9.7.1.17 fns: fns.b32 R,R,R,R
9.7.1.18 brev: brev.b32 R,R; brev.b64 D,D
9.7.1.19 bfe: bfe.[u32|s32] R,R,R,R; bfe.[u64|s64] D,D,R,R
9.7.1.20 bfi: bfi.b32 R,R,R,R,R; bfi.b64 D,D,D,R,R
9.7.1.21 szext: szext.[wrap|clamp].[u32|s32] R,R,R
9.7.1.22 bmsk: bmsk.[wrap|clamp].b32 R,R,R
9.7.1.23 dp4a: dp4a.[u32|s32].[u32|s32] R,R,R,R
9.7.1.24 dp2a: dp2a.[lo|hi].[u32|s32].[u32|s32] R,R,R,R
9.7.2.1 add.cc: add.cc.[u32|s32] R,R,R; add.cc.[u64|s64] D,D,D
9.7.2.2 addc: addc[.|.cc.][u32|s32] R,R,R; addc[.|.cc.]u64 D,D,D
9.7.2.3 sub.cc: sub.cc.[u32|s32] R,R,R; sub.cc.[u64|s64] D,D,D
9.7.2.4 subc: subc[.|.cc.][u32|s32] R,R,R; subc[.|.cc.]u64 D,D,D
9.7.2.5 mad.cc: mad.[lo|hi].cc.[u32|s32] R,R,R,R; mad.[lo|hi].cc.u64 D,D,D,D
9.7.2.6 madc: madc.[lo|hi][.|.cc.][u32|s32] R,R,R,R; madc.[lo|hi].u64 D,D,D,D
9.7.3.1 testp: testp.[finite|infinite|number|notanumber|normal|subnormal].f32 P,R; testp.finite.f64 P,D
9.7.3.2 copysign: copysign.f32 R,R,R; copysign.f64 D,D,D
9.7.3.3 add.f: add[.|.rn.|.rz.|.rm.|.rp.|.ftz.|.sat.]f32 R,R,R; add[.|.rn.|.rz.|.rm.|.rp.]f64 D,D,D; add[.|.rn.ftz.]f32x2 D,D,D
9.7.3.4 sub.f: sub[.|.rn.|.rz.|.rm.|.rp.|.ftz.|.sat.]f32 R,R,R; sub.f64 D,D,D; sub.rn.f32x2 D,D,D
9.7.3.5 mul.f: mul[.|.rn.|.rz.|.rm.|.rp.|.ftz.|.sat.]f32 R,R,R; mul.f64 D,D,D; mul.rn.f32x2 D,D,D
9.7.3.6 fma: fma.[rn|rz|rm|rp][.|.ftz.|.sat.]f32 R,R,R,R; fma.[rn|rz|rm|rp].f64 D,D,D,D; fma.rn[.|.ftz.]f32x2 D,D,D,D
9.7.3.7 mad.f: mad.[rn|rz|rm|rp].f32 R,R,R,R; mad.rn.f64 D,D,D,D
9.7.3.8 div.f: div.[approx|full|rn|rz|rm|rp][.|.ftz.]f32 R,R,R; div.[rn|rz|rm|rp].f64 D,D,D
9.7.3.9 abs.f: abs[.|.ftz.]f32 R,R; abs.f64 D,D
9.7.3.10 neg.f: neg[.|.ftz.]f32 R,R; neg.f64 D,D
9.7.3.11 min.f: min[.|.ftz.|.NaN.|.xorsign.abs.|.ftz.NaN.xorsign.abs.]f32 R,R,R; min.f32 R,R,R,R; min[.NaN.abs.|.abs.]f32 R,R,R,R; min.f64 D,D,D
9.7.3.12 max.f: max[.|.ftz.|.NaN.|.xorsign.abs.|.ftz.NaN.xorsign.abs.]f32 R,R,R; max.f32 R,R,R,R; max[.NaN.abs.|.abs.]f32 R,R,R,R; max.f64 D,D,D
9.7.3.13 rcp: rcp.[approx|rn|rz|rm|rp][.|.ftz.]f32 R,R; rcp.[rn|rz|rm|rp].f64 D,D
9.7.3.14 rcp.approx.ftz.f64: rcp.approx.ftz.f64 D,D
9.7.3.15 sqrt: sqrt.[approx|rn|rz|rm|rp][.|.ftz.]f32 R,R; sqrt.[rn|rz|rm|rp].f64 D,D
9.7.3.16 rsqrt: rsqrt.approx[.|.ftz.]f32 R,R; rsqrt.approx.f64 D,D
9.7.3.17 rsqrt.approx.ftz.f64: rsqrt.approx.ftz.f64 D,D
9.7.3.18 sin: sin.approx[.|.ftz.]f32 R,R
9.7.3.19 cos: cos.approx[.|.ftz.]f32 R,R
9.7.3.20 lg2: lg2.approx[.|.ftz.]f32 R,R
9.7.3.21 ex2: ex2.approx[.|.ftz.]f32 R,R
9.7.3.22 tanh: tanh.approx.f32 R,R
9.7.4.1 add.half: add[.|.rn.|.sat.|.ftz.]f16 H,H,H; add[.|.ftz.sat.]f16x2 R,R,R; add[.|.rn.]bf16 H,H,H; add.bf16x2 R,R,R
9.7.4.2 sub.half: sub[.|.rn.|.sat.|.ftz.]f16 H,H,H; sub.f16x2 R,R,R; sub.bf16 H,H,H; sub.bf16x2 R,R,R
9.7.4.3 mul.half: mul[.|.rn.|.sat.|.ftz.]f16 H,H,H; mul.f16x2 R,R,R; mul.bf16 H,H,H; mul.bf16x2 R,R,R
9.7.4.4 fma.half: fma.rn[.|.ftz.|.sat.|.relu.|.ftz.relu.|.oob.]f16 H,H,H,H; fma.rn[.|.relu.|.oob.]f16x2 R,R,R,R; fma.rn[.|.relu.|.oob.relu.]bf16 H,H,H,H; fma.rn[.|.relu.]bf16x2 R,R,R,R
9.7.4.5 neg.half: neg[.|.ftz.]f16 H,H; neg.[f16x2|bf16x2] R,R; neg.bf16 H,H
9.7.4.6 abs.half: abs[.|.ftz.]f16 H,H; abs.[f16x2|bf16x2] R,R; abs.bf16 H,H
9.7.4.7 min.half: min[.|.ftz.|.NaN.|.xorsign.abs.]f16 H,H,H; min[.|.NaN.]f16x2 R,R,R; min[.|.NaN.]bf16 H,H,H; min[.|.NaN.]bf16x2 R,R,R
9.7.4.8 max.half: max[.|.ftz.|.NaN.|.xorsign.abs.]f16 H,H,H; max[.|.NaN.]f16x2 R,R,R; max[.|.NaN.]bf16 H,H,H; max[.|.NaN.]bf16x2 R,R,R
9.7.4.9 tanh.half: tanh.approx.[f16|bf16] H,H; tanh.approx.[f16x2|bf16x2] R,R
9.7.4.10 ex2.half: ex2.approx.f16 H,H; ex2.approx.f16x2 R,R; ex2.approx.ftz.bf16 H,H; ex2.approx.ftz.bf16x2 R,R
9.7.5.1 add.mixed: add[.|.rn.|.rz.|.sat.]f32.[f16|bf16] R,H,R
9.7.5.2 sub.mixed: sub[.|.rn.|.rz.|.sat.]f32.[f16|bf16] R,H,R
9.7.5.3 fma.mixed: fma.rn[.|.sat.]f32.[f16|bf16] R,H,H,R
9.7.6.1 set: set.[eq|ne|lt|le|gt|ge|lo|ls|hi|hs].u32.u32 R,R,R; set.[equ|neu|ltu|leu|gtu|geu|num|nan][.|.ftz.]u32.f32 R,R,R; set.lt.[and|or|xor].f32.s32 R,R,R,P; set.lt.[u32|s32|f32].f64 R,D,D
9.7.6.2 setp: setp.[eq|ne|lt|le|gt|ge].[u32|s32] P,R,R; setp.[lo|ls|hi|hs].u32 P,R,R; setp.[eq|equ|neu|ltu|leu|gtu|geu|num|nan][.|.ftz.]f32 P,R,R; setp.lt.[and|or|xor].s32 P|P,R,R,P; setp.lt.[u64|s64|f64] P,D,D; setp.lt.[u16|s16] P,H,H
9.7.6.3 selp: selp.[b16|u16|s16] H,H,H,P; selp.[b32|u32|s32|f32] R,R,R,P; selp.[b64|u64|s64|f64] D,D,D,P
9.7.6.4 slct: slct.[b32|u32|f32].s32 R,R,R,R; slct[.|.ftz.]b32.f32 R,R,R,R; slct.[b64|f64].s32 D,D,D,R; slct.b16.s32 H,H,H,R
9.7.7.1 set.half: set.lt[.|.ftz.][f16|u16|s16].f16 H,H,H; set.lt[.|.ftz.][u32|s32].f16 R,H,H; set.lt.[f16x2|u32].f16x2 R,R,R; set.lt.[bf16|u16].bf16 H,H,H; set.lt.bf16x2.bf16x2 R,R,R
9.7.7.2 setp.half: setp.[lt|nan][.|.ftz.]f16 P,H,H; setp.lt.f16x2 P|P,R,R; setp.lt.bf16 P,H,H; setp.lt.bf16x2 P|P,R,R
9.7.8.1 and: and.pred P,P,P; and.b16 H,H,H; and.b32 R,R,R; and.b64 D,D,D
9.7.8.2 or: or.pred P,P,P; or.b16 H,H,H; or.b32 R,R,R; or.b64 D,D,D
9.7.8.3 xor: xor.pred P,P,P; xor.b16 H,H,H; xor.b32 R,R,R; xor.b64 D,D,D
9.7.8.4 not: not.pred P,P; not.b16 H,H; not.b32 R,R; not.b64 D,D
9.7.8.5 cnot: cnot.b16 H,H; cnot.b32 R,R; cnot.b64 D,D
9.7.8.6 lop3: lop3.b32 R,R,R,R,0x3f; lop3.[or|and].b32 R|P,R,R,R,0x3f,P
9.7.8.7 shf: shf.[l|r].[clamp|wrap].b32 R,R,R,R
9.7.8.8 shl: shl.b16 H,H,R; shl.b32 R,R,R; shl.b64 D,D,R
9.7.8.9 shr: shr.[b16|u16|s16] H,H,R; shr.[b32|u32|s32] R,R,R; shr.[b64|u64|s64] D,D,R
9.7.9.3 mov: mov.pred P,P; mov.[b16|u16|s16] H,H; mov.[b32|u32|s32|f32] R,R; mov.[b64|u64|s64|f64] D,D; mov.u64 D,smem; mov.b32 R,%tid.x
9.7.9.4 mov.pack: mov.b32 R,H2; mov.b32 H2,R; mov.b64 D,R2; mov.b64 R2,D; mov.b64 D,H4; mov.b64 H4,D; mov.b128 Q,D2; mov.b128 D2,Q
9.7.9.5 shfl: shfl.[up|down|bfly|idx].b32 R,R,R,R
9.7.9.6 shfl.sync: shfl.sync.[up|down|bfly|idx].b32 R|P,R,R,R,R; shfl.sync.idx.b32 R,R,R,R,R
9.7.9.7 prmt: prmt.b32[|.f4e|.b4e|.rc8|.ecl|.ecr|.rc16] R,R,R,R
9.7.9.8 ld: ld[.|.global.|.shared.|.shared::cta.|.shared::cluster.|.local.|.const.|.volatile.|.volatile.global.|.relaxed.cta.|.relaxed.gpu.global.|.acquire.cluster.|.acquire.sys.global.|.mmio.relaxed.sys.global.]u32 R,(D); ld.global.[ca|cg|cs|lu|cv].b32 R,(D); ld.global.[L1::evict_last|L1::no_allocate|L2::128B|L2::256B].b32 R,(D); ld.global.L2::cache_hint.b32 R,(D),D; ld.global.v2.b32 R2,(D); ld.global.v4.b32 R4,(D); ld.global.v8.b32 R8,(D); ld.global.v4.b64 D4,(D); ld.global.[b8|u8|s8|b16|u16|s16|f16] H,(D); ld.global.[b64|u64|s64|f64] D,(D); ld.global.b128 Q,(D); ld.param.u64 D,(par); ld.const.u32 R,(D); ld.global.b32.unified R,(D)
9.7.9.9 ld.global.nc: ld.global.nc[.|.L1::no_allocate.|.L2::128B.|.L1::no_allocate.L2::256B.|.ca.|.cg.]u32 R,(D); ld.global.nc.v2.f32 R2,(D); ld.global.nc.v8.b32 R8,(D); ld.global.nc.b128 Q,(D)
9.7.9.10 ldu: ldu.global.u32 R,(D); ldu.global.v4.f32 R4,(D)
9.7.9.11 st: st[.|.global.|.shared.|.shared::cta.|.shared::cluster.|.local.|.volatile.|.relaxed.cta.|.relaxed.gpu.global.|.release.cluster.|.release.sys.global.|.mmio.relaxed.sys.global.]u32 (D),R; st.global.[wb|cg|cs|wt].b32 (D),R; st.global.[L1::evict_last|L1::no_allocate].b32 (D),R; st.global.L2::cache_hint.b32 (D),R,D; st.global.v4.b32 (D),R4; st.global.v8.b32 (D),R8; st.global.v4.b64 (D),D4; st.global.[b8|u8|b16] (D),H; st.global.b64 (D),D; st.global.b128 (D),Q
9.7.9.12 st.async: st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.[b32|u32|f32] (S),R,(S); st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 (S),R4,(S); st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 (S),D,(S); st.async.mmio.release.sys.global.b32 (D),R
9.7.9.13 st.bulk: st.bulk.weak.shared::cta (S),D,0; st.bulk (D),D,0
9.7.9.14 multimem.ld_reduce: multimem.ld_reduce.relaxed.sys.global.add.f32 R,(D)
9.7.9.14 multimem.st: multimem.st.relaxed.sys.global.f32 (D),R
9.7.9.14 multimem.red: multimem.red.relaxed.sys.global.add.f32 (D),R
9.7.9.15 prefetch: prefetch.global.[L1|L2] (D); prefetch.global.L2::evict_last (D); prefetch.tensormap (D)
9.7.9.15 prefetchu: prefetchu.L1 (D)
9.7.9.16 applypriority: applypriority.global.L2::evict_normal (D),128
9.7.9.17 discard: discard.global.L2 (D),128
9.7.9.18 createpolicy: createpolicy.fractional.L2::evict_last.b64 D,1.0; createpolicy.range.global.L2::evict_last.L2::evict_unchanged.b64 D,(D),R,R; createpolicy.cvt.L2.b64 D,D
9.7.9.19 isspacep: isspacep.[global|shared|shared::cta|shared::cluster|local|const|param] P,D
9.7.9.20 cvta: cvta.[global|shared|shared::cta|shared::cluster|local|const|param].u64 D,D; cvta.to.[global|shared|shared::cta|shared::cluster|local|const|param].u64 D,D
9.7.9.21 cvt: cvt.[u8|s8|u32|s32].u32 R,R; cvt.u64.u32 D,R; cvt.u16.u32 H,R; cvt.[s64|u64].s32 D,R; cvt.u32.u64 R,D; cvt.[rni|rzi|rmi|rpi].s32.f32 R,R; cvt.[rn|rz|rm|rp].f32.s32 R,R; cvt.rzi.s64.f64 D,D; cvt.sat.u8.s32 R,R; cvt.f64.f32 D,R; cvt.[rn|rz|rm|rp].f32.f64 R,D; cvt.[rn|rz].[f16|bf16].f32 H,R; cvt.rn.[relu|satfinite].f16.f32 H,R; cvt.f32.[f16|bf16] R,H; cvt.[rn|rz|rn.relu|rn.satfinite].[f16x2|bf16x2].f32 R,R,R; cvt.rs.[f16x2|bf16x2].f32 R,R,R,R; cvt.[rna|rn|rz|rna.satfinite].tf32.f32 R,R; cvt.rn.satfinite[.|.relu.][e4m3x2|e5m2x2].f32 H,R,R; cvt.rn.satfinite.[e4m3x2|e5m2x2].f16x2 H,R; cvt.rn[.|.relu.]f16x2.[e4m3x2|e5m2x2] R,H; cvt.rs.satfinite.[e4m3x4|e5m2x4].f32 R,R4,R; cvt.rn.satfinite.[e2m3x2|e3m2x2].f32 H,R,R; cvt.rn.f16x2.[e2m3x2|e3m2x2] R,H; cvt.[rz|rp].ue8m0x2.f32 H,R,R; cvt.[rz|rp].ue8m0x2.bf16x2 H,R; cvt.rn.bf16x2.ue8m0x2 R,H; cvt.rn.satfinite.s2f6x2.f32 H,R,R; cvt.rn.bf16.[u32|s32] H,R
9.7.9.21 cvt.b8: {.reg .b8 b; cvt.rn.satfinite.e2m1x2.f32 b,R,R;}; {.reg .b8 b; cvt.rn.f16x2.e2m1x2 R,b;}
9.7.9.22 cvt.pack: cvt.pack.sat.[u16|s16].s32 R,R,R; cvt.pack.sat.[u8|s8|u4|s4|u2|s2].s32.b32 R,R,R,R
9.7.9.23 mapa: mapa.u64 D,D,R; mapa.shared::cluster.u32 R,R,R
9.7.9.24 getctarank: getctarank.u64 R,D; getctarank.shared::cluster.u32 R,R
9.7.9.25.3 cp.async: cp.async.ca.shared.global (S),(D),[4|8|16]; cp.async.cg.shared::cta.global (S),(D),16; cp.async.cg.shared.global.L2::128B (S),(D),16; cp.async.ca.shared.global (S),(D),4,R; cp.async.ca.shared.global (S),(D),4,P; cp.async.cg.shared.global.L2::cache_hint (S),(D),16,D
9.7.9.25.3 cp.async.commit_group: cp.async.commit_group
9.7.9.25.3 cp.async.wait_group: cp.async.wait_group 1; cp.async.wait_all
9.7.9.25.4 cp.async.bulk: cp.async.bulk.shared::[cluster|cta].global.mbarrier::complete_tx::bytes (S),(D),R,(S); cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster (S),(D),R,(S),H; cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint (S),(D),R,(S),D; cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes (S),(S),R,(S); cp.async.bulk.global.shared::cta.bulk_group (D),(S),R; cp.async.bulk.global.shared::cta.bulk_group.cp_mask (D),(S),R,H; cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint (D),(S),R,D; cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.ignore_oob (S),(D),R,R,R,(S)
9.7.9.25.4 cp.reduce.async.bulk: cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.[add|min|max|inc|dec|and|or|xor].u32 (S),(S),R,(S); cp.reduce.async.bulk.global.shared::cta.bulk_group.[add|min|max|inc|dec|and|or|xor].u32 (D),(S),R; cp.reduce.async.bulk.global.shared::cta.bulk_group.add.[s32|u64|f32|f64|noftz.f16|noftz.bf16] (D),(S),R; cp.reduce.async.bulk.global.shared::cta.bulk_group.[min|max].[f16|bf16] (D),(S),R
9.7.9.25.4 cp.async.bulk.prefetch: cp.async.bulk.prefetch.L2.global (D),R; cp.async.bulk.prefetch.L2.global.L2::cache_hint (D),R,D
9.7.9.25.5 cp.async.bulk.tensor: cp.async.bulk.tensor.1d.shared::cta.global.tile.mbarrier::complete_tx::bytes (S),(D,{R}),(S); cp.async.bulk.tensor.[2d.shared::cluster.global.mbarrier::complete_tx::bytes|2d.shared::cta.global.tile.mbarrier::complete_tx::bytes] (S),(D,{R,R}),(S); cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes (S),(D,{R,R,R,R,R}),(S); cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster (S),(D,{R,R}),(S),H; cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.cta_group::[1|2] (S),(D,{R,R}),(S); cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint (S),(D,{R,R}),(S),D; cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes (S),(D,{R,R,R,R,R}),(S); cp.async.bulk.tensor.2d.global.shared::cta.bulk_group (D,{R,R}),(S); cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group (D,{R,R,R,R,R}),(S); cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes (S),(D,{R,R,R,R}),(S),{H,H}; cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group (D,{R,R,R,R}),(S); cp.async.bulk.tensor.4d.shared::cluster.global.im2col::w.mbarrier::complete_tx::bytes (S),(D,{R,R,R,R}),(S),{H,H}
9.7.9.25.5 cp.reduce.async.bulk.tensor: cp.reduce.async.bulk.tensor.2d.global.shared::cta.[add|min|max|inc|dec|and|or|xor].tile.bulk_group (D,{R,R}),(S); cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.im2col_no_offs.bulk_group (D,{R,R,R,R}),(S)
9.7.9.25.5 cp.async.bulk.prefetch.tensor: cp.async.bulk.prefetch.tensor.2d.L2.global.tile (D,{R,R}); cp.async.bulk.prefetch.tensor.2d.L2.global.tile::gather4 (D,{R,R,R,R,R})
9.7.9.25.6 cp.async.bulk.commit_group: cp.async.bulk.commit_group
9.7.9.25.6 cp.async.bulk.wait_group: cp.async.bulk.wait_group 1; cp.async.bulk.wait_group.read 0
9.7.9.26 multimem.cp.async.bulk: multimem.cp.async.bulk.global.shared::cta.bulk_group (D),(S),R
9.7.9.27 multimem.cp.reduce.async.bulk: multimem.cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 (D),(S),R
9.7.9.28 tensormap.replace: tensormap.replace.tile.global_address.[global|shared::cta].b1024.b64 (D),D; tensormap.replace.tile.[rank|elemtype|interleave_layout|swizzle_mode|fill_mode|swizzle_atomicity].shared::cta.b1024.b32 (D),1; tensormap.replace.tile.[box_dim|global_dim|element_stride].shared::cta.b1024.b32 (D),0,R; tensormap.replace.tile.global_stride.shared::cta.b1024.b64 (D),0,D
9.7.10.3 tex: tex.2d.v4.f32.f32 R4,(D,{R,R})
9.7.10.4 tld4: tld4.r.2d.v4.f32.f32 R4,(D,{R,R})
9.7.10.5 txq: txq.width.b32 R,(D)
9.7.10.6 istypep: istypep.texref P,D
9.7.11.1 suld: suld.b.1d.b32.trap R,(D,{R})
9.7.11.2 sust: sust.b.1d.b32.trap (D,{R}),R
9.7.11.3 sured: sured.b.add.2d.u32.trap (D,{R,R}),R
9.7.11.4 suq: suq.width.b32 R,(D)
9.7.12.1 {}: {add.u32 R,R,R;}
9.7.12.2 @: @P add.u32 R,R,R; @!P add.u32 R,R,R
9.7.12.3 bra: bra HERE; bra.uni HERE
9.7.12.4 brx.idx: {there: .branchtargets HERE; brx.idx R, there;}; {there: .branchtargets HERE; brx.idx.uni R, there;}
9.7.12.5 call: call.uni nothing; call.uni (r0), function, (r1)
9.7.12.6 ret: ret; ret.uni
9.7.12.7 exit: exit
9.7.13.1 bar.sync: bar.sync 1; bar.sync 1,64; bar.sync R,R; bar.cta.sync 1; barrier.sync 1; barrier.cta.sync.aligned 1,64
9.7.13.1 bar.arrive: bar.arrive 1,64; bar.cta.arrive 1,64; barrier.cta.arrive.aligned 1,64; barrier.arrive R,R
9.7.13.1 bar.red: bar.red.popc.u32 R,1,P; bar.red.[and|or].pred P,1,P; barrier.cta.red.popc.aligned.u32 R,1,64,P
9.7.13.2 bar.warp.sync: bar.warp.sync R; bar.warp.sync 0xffffffff
9.7.13.3 barrier.cluster: barrier.cluster.arrive[|.release|.relaxed][|.aligned]; barrier.cluster.wait[|.acquire][|.aligned]
9.7.13.4 fence: fence[|.sc|.acq_rel|.acquire|.release].[cta|cluster|gpu|sys]; fence.mbarrier_init.release.cluster; fence.acquire.sync_restrict::shared::cluster.cluster; fence.release.sync_restrict::shared::cta.cluster
9.7.13.4 fence.proxy: fence.proxy.async[|.global|.shared::cta|.shared::cluster]; fence.proxy.alias; fence.proxy.tensormap::generic.release.[cta|cluster|gpu|sys]; fence.proxy.tensormap::generic.acquire.gpu (D),128; fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster; fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster
9.7.13.4 membar: membar.[cta|gl|sys]; membar.proxy.alias
9.7.13.5 atom: atom.global.[and|or|xor|exch|add|inc|dec|min|max].[u32|b32] R,(D),R; atom.[relaxed|acquire|release|acq_rel].[cta|cluster|gpu|sys].global.add.u32 R,(D),R; atom.shared.cas.b32 R,(D),R,R; atom.global.cas.b16 H,(D),H,H; atom.global.cas.b64 D,(D),D,D; atom.global.exch.b128 Q,(D),Q; atom.global.cas.b128 Q,(D),Q,Q; atom.global.add.f32 R,(D),R; atom.global.add.[f64|u64] D,(D),D; atom.global.add.noftz.[f16|bf16] H,(D),H; atom.global.add.noftz.[f16x2|bf16x2] R,(D),R; atom.global.add.v4.f32 R4,(D),R4; atom.global.[add|min|max].noftz.v4.f16x2 R4,(D),R4; atom.global.add.noftz.v8.bf16 H8,(D),H8; atom.global.add.L2::cache_hint.u32 R,(D),R,D; atom.shared::cluster.add.s32 R,(D),R
9.7.13.6 red: red.global.[and|or|xor|add|inc|dec|min|max].u32 (D),R; red.[relaxed|release].[cta|cluster|gpu|sys].global.add.u32 (D),R; red.shared.add.s32 (D),R; red.global.add.f32 (D),R; red.global.add.[f64|u64] (D),D; red.global.add.noftz.[f16|bf16] (D),H; red.global.add.noftz.[f16x2|bf16x2] (D),R; red.global.add.v4.f32 (D),R4; red.global.[add|min|max].noftz.v4.f16x2 (D),R4; red.global.add.noftz.v8.bf16 (D),H8
9.7.13.7 red.async: red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.[add|inc|dec|min|max|and|or|xor].u32 (S),R,(S); red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u64 (S),D,(S); red.async.mmio.release.sys.global.add.u32 (D),R
9.7.13.8 vote: vote.all.pred P,P
9.7.13.9 vote.sync: vote.sync.[all|any|uni].pred P,P,R; vote.sync.ballot.b32 R,P,R
9.7.13.10 match.sync: match.any.sync.b32 R,R,R; match.any.sync.b64 R,D,R; match.all.sync.b32 R|P,R,R; match.all.sync.b64 R|P,D,R
9.7.13.11 activemask: activemask.b32 R
9.7.13.12 redux.sync: redux.sync.[add|min|max].[u32|s32] R,R,R; redux.sync.[and|or|xor].b32 R,R,R; redux.sync.[min|max][.|.abs.|.NaN.|.abs.NaN.]f32 R,R,R
9.7.13.13 griddepcontrol: griddepcontrol.[wait|launch_dependents]
9.7.13.14 elect.sync: elect.sync R|P,R; elect.sync _|P,R
9.7.13.15.9 mbarrier.init: mbarrier.init[|.shared|.shared::cta].b64 (S),R
9.7.13.15.10 mbarrier.inval: mbarrier.inval.shared.b64 (S)
9.7.13.15.11 mbarrier.expect_tx: mbarrier.expect_tx.relaxed.[cta|cluster].shared::[cta|cluster].b64 (S),R
9.7.13.15.12 mbarrier.complete_tx: mbarrier.complete_tx.relaxed.cluster.shared::[cta|cluster].b64 (S),R
9.7.13.15.13 mbarrier.arrive: mbarrier.arrive.shared.b64 D,(S); mbarrier.arrive.shared.b64 D,(S),R; mbarrier.arrive.[release|relaxed].[cta|cluster].shared::cta.b64 _,(S); mbarrier.arrive.release.cluster.shared::cluster.b64 _,(S); mbarrier.arrive.expect_tx.shared.b64 D,(S),R; mbarrier.arrive.expect_tx.[release|relaxed].cluster.shared::cluster.b64 _,(S),R; mbarrier.arrive.noComplete.shared.b64 D,(S),R
9.7.13.15.14 mbarrier.arrive_drop: mbarrier.arrive_drop.shared.b64 D,(S); mbarrier.arrive_drop.release.cluster.shared::cluster.b64 _,(S); mbarrier.arrive_drop.expect_tx.shared.b64 D,(S),R; mbarrier.arrive_drop.noComplete.shared.b64 D,(S),R
9.7.13.15.15 cp.async.mbarrier.arrive: cp.async.mbarrier.arrive[|.noinc][|.shared|.shared::cta].b64 (S)
9.7.13.15.16 mbarrier.test_wait: mbarrier.test_wait.shared.b64 P,(S),D; mbarrier.test_wait.parity[|.acquire.cta|.acquire.cluster|.relaxed.cta].shared::cta.b64 P,(S),R
9.7.13.15.16 mbarrier.try_wait: mbarrier.try_wait.shared.b64 P,(S),D; mbarrier.try_wait.parity[|.acquire.cta|.acquire.cluster|.relaxed.cluster].shared::cta.b64 P,(S),R; mbarrier.try_wait.parity.shared.b64 P,(S),R,R
9.7.13.15.17 mbarrier.pending_count: mbarrier.pending_count.b64 R,D
9.7.13.16 tensormap.cp_fenceproxy: tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned (D),(S),128
9.7.13.17 clusterlaunchcontrol.try_cancel: clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes[|.multicast::cluster::all].b128 (S),(S)
9.7.13.18 clusterlaunchcontrol.query_cancel: clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 P,Q; clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {R,R,R,_},Q; clusterlaunchcontrol.query_cancel.get_first_ctaid::[x|y|z].b32.b128 R,Q
9.7.14.4 wmma.load: wmma.load.a.sync.aligned.row.m16n16k16.global.f16 R8,(D)
9.7.14.4 wmma.store: wmma.store.d.sync.aligned.row.m16n16k16.global.f32 (D),R8
9.7.14.4 wmma.mma: wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 R8,R8,R8,R8
9.7.14.5 mma: mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 D2,{D},{D},D2; mma.sync.aligned.m16n8k8.row.col.f32.[f16.f16|bf16.bf16].f32 R4,R2,{R},R4; mma.sync.aligned.m16n8k16.row.col.f32.[f16.f16|bf16.bf16].f32 R4,R4,R2,R4; mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 R2,R4,R2,R2; mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 R4,R2,{R},R4; mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 R4,R4,R2,R4; mma.sync.aligned.m16n8k32.row.col.f32.[e4m3.e4m3|e5m2.e5m2|e4m3.e5m2].f32 R4,R4,R2,R4; mma.sync.aligned.m16n8k32.row.col[|.satfinite].s32.[s8.s8|u8.u8|s8.u8].s32 R4,R4,R2,R4; mma.sync.aligned.m16n8k64.row.col.s32.[s4.s4|u4.u4].s32 R4,R4,R2,R4; mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.[and|xor].popc R4,R4,R2,R4; mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 R8,R2,R2,R8; mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.[e4m3.e2m1|e3m2.e2m3].f32 R4,R4,R2,R4; mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale[|.scale_vec::1X].f32.[e4m3.e5m2|e2m3.e3m2|e2m1.e2m1].f32.ue8m0 R4,R4,R2,R4,R,{H,H},R,{H,H}; mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale[|.scale_vec::2X].f32.e2m1.e2m1.f32.ue8m0 R4,R4,R2,R4,R,{H,H},R,{H,H}; mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.[scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0|scale_vec::4X.f32.e2m1.e2m1.f32.ue8m0|scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3] R4,R4,R2,R4,R,{H,H},R,{H,H}
9.7.14.5 ldmatrix: ldmatrix.sync.aligned.m8n8.x1[|.trans].shared.b16 {R},(S); ldmatrix.sync.aligned.m8n8.x2[|.trans].shared.b16 R2,(S); ldmatrix.sync.aligned.m8n8.x4[|.trans].shared.b16 R4,(S); ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 R2,(S); ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8 R4,(S); ldmatrix.sync.aligned.m8n16.x1.shared.b8x16.[b6x16_p32|b4x16_p64] {R},(S); ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8x16.[b6x16_p32|b4x16_p64] R2,(S)
9.7.14.5 stmatrix: stmatrix.sync.aligned.m8n8.x4[|.trans].shared.b16 (S),R4; stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 (S),{R}
9.7.14.5 movmatrix: movmatrix.sync.aligned.m8n8.trans.b16 R,R
9.7.14.6 mma.sp: mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 R4,R4,R4,R4,R,0
9.7.15.5 wgmma.mma_async: wgmma.mma_async.sync.aligned.m64n8k16.f32.[f16.f16|bf16.bf16] R4,D,D,1,1,1,0,0; wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 R4,R4,D,1,1,1,0; wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 R4,D,D,1,1,1; wgmma.mma_async.sync.aligned.m64n8k32.f32.[e4m3.e4m3|e5m2.e5m2] R4,D,D,1,1,1; wgmma.mma_async.sync.aligned.m64n8k16.f16.f16.f16 R2,D,D,1,1,1,0,0; wgmma.mma_async.sync.aligned.m64n8k32.s32.[s8.s8|u8.u8] R4,D,D,1; wgmma.mma_async.sync.aligned.m64n8k256.s32.b1.b1.and.popc R4,D,D,1
9.7.15.6 wgmma.mma_async.sp: wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 R4,D,D,R,0,1,1,1,0,0
9.7.15.7 wgmma.fence: wgmma.fence.sync.aligned
9.7.15.7 wgmma.commit_group: wgmma.commit_group.sync.aligned
9.7.15.7 wgmma.wait_group: wgmma.wait_group.sync.aligned 1
9.7.16.7 tcgen05.alloc: tcgen05.alloc.cta_group::[1|2].sync.aligned.shared::cta.b32 (S),R; tcgen05.alloc.cta_group::1.sync.aligned.b32 (S),64
9.7.16.7 tcgen05.dealloc: tcgen05.dealloc.cta_group::[1|2].sync.aligned.b32 M,R
9.7.16.7 tcgen05.relinquish_alloc_permit: tcgen05.relinquish_alloc_permit.cta_group::[1|2].sync.aligned
9.7.16.8 tcgen05.ld: tcgen05.ld.sync.aligned.32x32b.x1[|.pack::16b].b32 {R},(M); tcgen05.ld.sync.aligned.16x64b.x2.b32 R2,(M); tcgen05.ld.sync.aligned.16x128b.x2.b32 R4,(M); tcgen05.ld.sync.aligned.16x256b.x2.b32 R8,(M); tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {R},(M),2; tcgen05.ld.red.sync.aligned.32x32b.x2.[min|max.abs|max.NaN].f32 R2,R,(M); tcgen05.ld.red.sync.aligned.16x32bx2.x2.max.[s32|u32] R2,R,(M),2
9.7.16.8 tcgen05.st: tcgen05.st.sync.aligned.32x32b.x1[|.unpack::16b].b32 (M),{R}; tcgen05.st.sync.aligned.16x64b.x2.b32 (M),R2; tcgen05.st.sync.aligned.16x128b.x2.b32 (M),R4; tcgen05.st.sync.aligned.16x256b.x2.b32 (M),R8; tcgen05.st.sync.aligned.16x32bx2.x1.b32 (M),2,{R}
9.7.16.8 tcgen05.wait: tcgen05.wait::[ld|st].sync.aligned
9.7.16.9 tcgen05.cp: tcgen05.cp.cta_group::[1|2].[128x256b|4x256b|128x128b] (M),D; tcgen05.cp.cta_group::1.[64x128b.warpx2::02_13|64x128b.warpx2::01_23|32x128b.warpx4] (M),D; tcgen05.cp.cta_group::1.128x256b.b8x16.[b4x16_p64|b6x16_p32] (M),D
9.7.16.9 tcgen05.shift: tcgen05.shift.cta_group::[1|2].down (M)
9.7.16.10 tcgen05.mma: tcgen05.mma.cta_group::[1|2].kind::[f16|tf32|f8f6f4|i8] (M),D,D,R,P; tcgen05.mma.cta_group::1.kind::f16 (M),(M),D,R,P; tcgen05.mma.cta_group::1.kind::f16 (M),D,D,R,R4,P; tcgen05.mma.cta_group::1.kind::f16 (M),D,D,R,P,2; tcgen05.mma.cta_group::1.kind::f16.collector::a::[fill|use|lastuse|discard] (M),D,D,R,P; tcgen05.mma.cta_group::1.kind::f16.ashift (M),(M),D,R,P; tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale[|.block32] (M),D,D,R,(M),(M),P; tcgen05.mma.cta_group::1.kind::mxf4.block_scale.[scale_vec::2X|block32] (M),D,D,R,(M),(M),P; tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.[scale_vec::2X|scale_vec::4X|block16] (M),D,D,R,(M),(M),P
9.7.16.10 tcgen05.mma.sp: tcgen05.mma.sp.cta_group::1.kind::f16 (M),D,D,(M),R,P
9.7.16.10 tcgen05.mma.ws: tcgen05.mma.ws.cta_group::1.kind::[f16|tf32|f8f6f4|i8] (M),D,D,R,P; tcgen05.mma.ws.cta_group::1.kind::f16.collector::b0::fill (M),D,D,R,P; tcgen05.mma.ws.cta_group::1.kind::f16 (M),D,D,R,P,D
9.7.16.10 tcgen05.mma.ws.sp: tcgen05.mma.ws.sp.cta_group::1.kind::f16 (M),D,D,(M),R,P
9.7.16.11 tcgen05.fence: tcgen05.fence::[before|after]_thread_sync
9.7.16.12 tcgen05.commit: tcgen05.commit.cta_group::[1|2].mbarrier::arrive::one[|.shared::cluster].b64 (S); tcgen05.commit.cta_group::[1|2].mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 (S),H
9.7.17.1 stacksave: stacksave.u64 D
9.7.17.2 stackrestore: stackrestore.u64 D
9.7.17.3 alloca: alloca.u64 D,D
9.7.18.1 vadd: vadd.s32.s32.s32 R,R,R
9.7.18.1 vsub: vsub.s32.s32.s32 R,R,R
9.7.18.1 vabsdiff: vabsdiff.u32.u32.u32 R,R,R
9.7.18.1 vmin: vmin.s32.s32.s32 R,R,R
9.7.18.1 vmax: vmax.s32.s32.s32 R,R,R
9.7.18.1 vshl: vshl.u32.u32.u32.clamp R,R,R
9.7.18.1 vshr: vshr.u32.u32.u32.clamp R,R,R
9.7.18.1 vmad: vmad.s32.s32.s32 R,R,R,R
9.7.18.1 vset: vset.s32.s32.lt R,R,R
9.7.18.2 vadd2: vadd2.s32.s32.s32 R,R,R,R
9.7.18.2 vsub2: vsub2.s32.s32.s32 R,R,R,R
9.7.18.2 vavrg2: vavrg2.s32.s32.s32 R,R,R,R
9.7.18.2 vabsdiff2: vabsdiff2.u32.u32.u32 R,R,R,R
9.7.18.2 vmin2: vmin2.s32.s32.s32 R,R,R,R
9.7.18.2 vmax2: vmax2.s32.s32.s32 R,R,R,R
9.7.18.2 vset2: vset2.s32.s32.lt R,R,R,R
9.7.18.2 vadd4: vadd4.s32.s32.s32 R,R,R,R
9.7.18.2 vsub4: vsub4.s32.s32.s32 R,R,R,R
9.7.18.2 vavrg4: vavrg4.s32.s32.s32 R,R,R,R
9.7.18.2 vabsdiff4: vabsdiff4.u32.u32.u32 R,R,R,R
9.7.18.2 vmin4: vmin4.s32.s32.s32 R,R,R,R
9.7.18.2 vmax4: vmax4.s32.s32.s32 R,R,R,R
9.7.18.2 vset4: vset4.s32.s32.lt R,R,R,R
9.7.19.1 brkpt: brkpt
9.7.19.2 nanosleep: nanosleep.u32 R; nanosleep.u32 100
9.7.19.3 pmevent: pmevent 1; pmevent.mask 3
9.7.19.4 trap: trap
9.7.19.5 setmaxnreg: setmaxnreg.[inc|dec].sync.aligned.u32 64
"""  # noqa: E501
